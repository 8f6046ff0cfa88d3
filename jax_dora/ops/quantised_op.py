"""Operators on a quantised kernel, as operators on plain arrays whose axes have names.

A kernel [in, out] in tiles of w rows, with scales [in / w, out], is bound as

    qvalue [i, w, out]     scale [i, out]     x [..., i, w]     lora_a [i, w, r]     in = i × w

so that the axes that a qvalue and its scales share bear one name, and are sharded alike; "w" and
"v", inside of a tile, are sharded over nothing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jax_dora.ops.quantised import is_quantised, qtype_name
from jax_dora.ops.shard import Op, Shard

_INSIDE = {"i": "w", "o": "v"}


class Quantised(NamedTuple):
    """`run` of an operator whose axes are split: it puts its operands together and runs the
    operator.

    Attributes:
      op: the operator.
      kind: of its operands.
      place: of the quantised one among them.
      make: its class.
      qtype: its format.
      split: the names of the axes that are split.
      tiled: the names of the axes that its scales have.
      has_zero_point: whether zero points follow the scales.
    """

    op: Op
    kind: Any
    place: int
    make: Any
    qtype: Any
    split: tuple[str, ...]
    tiled: tuple[str, ...]
    has_zero_point: bool

    def __call__(self, static: Any, shard: Shard, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        fields, texts, after = list(operands), self.op.operands, self.place + 1
        count = 1 + self.has_zero_point
        tiles, fields[after : after + count] = fields[after : after + count], []
        names = texts[self.place].split()
        widths = self._widths(fields[self.place].shape, names)
        joined = [
            one if one is None else _joined(one, text, self.split)
            for one, text in zip(fields, texts, strict=True)
        ]
        for place, one in enumerate(tiles):
            sizes = dict(zip(self.tiled, one.shape, strict=True))
            tiles[place] = one.reshape([sizes.get(name, 1) for name in names])
        scale, zero_point = (*tiles, None)[:2]
        joined[self.place] = self.make(joined[self.place], scale, zero_point, self.qtype)
        results = self.op.run(static, shard, self.kind(*joined))
        return tuple(
            one if one is None else _apart(one, text, widths)
            for one, text in zip(results, self.op.results, strict=True)
        )

    def _widths(self, shape: tuple[int, ...], names: list[str]) -> dict[str, int]:
        """Returns by their names how wide the tiles are along the axes that are split."""
        sizes, widths = iter(shape), {}
        for name in names:
            next(sizes)
            if name in self.split:
                widths[name] = next(sizes)
        return widths


def place_of(operands: Any) -> int | None:
    """Returns the place of a quantised array among the operands, or None."""
    return next((at for at, one in enumerate(operands) if is_quantised(one)), None)


def split(op: Op, operands: Any, place: int) -> tuple[Op, tuple[Any, ...]]:
    """Returns `op` with its axes split as the tiles of the operand at `place` are, and operands for
    it, plain arrays; `joined` takes its results."""
    kernel = operands[place]
    names = op.operands[place].split()
    widths, tiled, renamed = {}, [], {}
    # Padding is zeros, which these formats take for other numbers unless the scale is zero too.
    zeros_count = qtype_name(kernel) == "nf4" or kernel.zero_point is not None
    for name, size, count in zip(names, kernel.shape, kernel.scale.shape, strict=True):
        if count == 1 and zeros_count:
            renamed[name] = _INSIDE[name]
        if count > 1:
            tiled.append(name)
        if 1 < count < size:
            widths[name] = size // count
    run = Quantised(
        op,
        type(operands),
        place,
        type(kernel),
        kernel.qtype,
        tuple(widths),
        tuple(tiled),
        kernel.zero_point is not None,
    )
    texts = [_split_text(text, widths, renamed) for text in op.operands]
    arrays = [
        one if one is None or is_quantised(one) else _apart(one, text, widths)
        for one, text in zip(operands, op.operands, strict=True)
    ]
    scales = [one for one in (kernel.scale, kernel.zero_point) if one is not None]
    kept = [size for size in kernel.scale.shape if size > 1]
    arrays[place : place + 1] = [
        _apart(kernel.qvalue, op.operands[place], widths),
        *(one.reshape(kept) for one in scales),
    ]
    texts[place : place + 1] = [texts[place], *[" ".join(tiled)] * len(scales)]
    results = tuple(_split_text(text, widths, renamed) for text in op.results)
    return Op(f"quantised {op.name}", run, tuple(texts), results, op.contracted), tuple(arrays)


def joined(op: Op, results: Any) -> tuple[Any, ...]:
    """Returns the results of an operator that `split` returned as the original's."""
    run: Any = op.run
    return tuple(
        one if one is None else _joined(one, text, run.split)
        for one, text in zip(results, run.op.results, strict=True)
    )


def _split_text(text: str, widths: Mapping[str, int], renamed: Mapping[str, str]) -> str:
    names = [
        f"{name} {_INSIDE[name]}" if name in widths else renamed.get(name, name)
        for name in text.split()
    ]
    return " ".join(names)


def _apart(array: jax.Array, text: str, widths: Mapping[str, int]) -> jax.Array:
    """Returns an array of the axes `text` with those in `widths` split into (tiles, width)."""
    names = [name for name in text.split() if name != "t"]
    lead = array.ndim - len(names)
    shape = list(array.shape[:lead])
    for name, size in zip(names, array.shape[lead:], strict=True):
        shape += [size // widths[name], widths[name]] if name in widths else [size]
    return array.reshape(shape)


def _joined(array: jax.Array, text: str, names_split: tuple[str, ...]) -> jax.Array:
    """Reverses `_apart`."""
    names = [name for name in text.split() if name != "t"]
    lead = array.ndim - sum(1 + (name in names_split) for name in names)
    shape, sizes = list(array.shape[:lead]), iter(array.shape[lead:])
    for name in names:
        shape.append(next(sizes) * (next(sizes) if name in names_split else 1))
    return array.reshape(shape)
