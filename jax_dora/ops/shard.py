"""Finds a device's part of an operator's arrays, by the names of their axes.

An operator names the axes of its operands and of its results as an einsum does. A device works on
one block of every named axis; results that lack a contracted axis are added up over the devices
that this axis is sharded over.

A quantised operand is named as a plain one is. Its scales have an axis for each of its axes, of the
same name in capitals where that is tiled, and go where the tiles go: a tiled axis is sharded in
whole tiles, over devices that divide them evenly, or not at all. So is one with a single scale,
since padding, which is zeros, stands for other numbers in some formats unless its scale is zero.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jax_dora.ops.quantised import is_quantised, stored

# The names of axes that are never sharded: the rank, a seed's, and those of single scales.
WHOLE = frozenset({"r", "s", "one_i", "one_o"})


@dataclasses.dataclass(frozen=True)
class Shard:
    """A device's part of a call; by default all of it.

    Attributes:
      axes: named axes, each with the axes of the mesh that it is sharded over.
      summed: those that a contracted axis is sharded over.
      gathered: a matrix is gathered for the call, as kernels are under FSDP, where XLA gathers the
        next one while a product runs.
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    summed: tuple[str, ...] = ()
    gathered: bool = False

    @property
    def shares_rows(self) -> bool:
        """Returns whether rows are sharded, so that gradients of parameters are summed over the
        devices while others are computed."""
        return any(name.startswith("t") for name, _ in self.axes)

    def over(self, name: str) -> tuple[str, ...]:
        """Returns the axes of the mesh that a named axis is sharded over."""
        return dict(self.axes).get(name, ())

    def start(self, name: str, size: int) -> Any:
        """Returns where the device's `size` elements of a named axis begin."""
        axes = self.over(name)
        return lax.axis_index(axes) * size if axes else 0

    def once(self, array: Any) -> Any:
        """Returns what is added once in a sum over devices: zeros on all of them but the first."""
        if array is None or not self.summed:
            return array
        return jnp.where(lax.axis_index(self.summed) == 0, array, jnp.zeros((), array.dtype))

    def sum(self, array: Any) -> Any:
        """Returns the sum of the devices' parts of a contraction."""
        return lax.psum(array, self.summed) if self.summed and array is not None else array

    def largest(self, array: Any) -> Any:
        """Returns the largest of the devices' parts of a contracted axis, element by element."""
        return lax.pmax(array, self.summed) if self.summed else array


class Op(NamedTuple):
    """An operator, by what it does on one device and by the names of its arrays' axes.

    "t" stands for all leading axes, "r" for the rank, and "s" for a seed's axis; the names in a
    string are separated by spaces.

    Attributes:
      name: what programs show of it.
      run: `(static, shard, operands) -> results`; chooses the kernel by `static.implementation`.
      operands: the names for each field of the operands.
      results: the names for each result.
      contracted: the name that is summed over in the results that lack it.
    """

    name: str
    run: Callable[[Any, Shard, Any], tuple[Any, ...]]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    contracted: str = ""

    def __repr__(self) -> str:
        return self.name


class Names(NamedTuple):
    """The names of the axes of every array in a call: a tuple for each.

    Attributes:
      operands, results: of those that are not None; of a quantised one those of its codes, then of
        its scales and zero points.
      contracted: the names that are summed over.
      pieces: of axes of a quantised operand, how many pieces no device may have a part of.
    """

    operands: list[tuple[str, ...]]
    results: list[tuple[str, ...]]
    contracted: tuple[str, ...]
    pieces: dict[str, int]

    @classmethod
    def of(cls, op: Op, operands: Sequence[Any], results: Sequence[Any]) -> "Names":
        """Returns the names of a call's axes, from the operator's and from arrays or their types,
        or None."""
        pieces: dict[str, int] = {}
        named: list[list[tuple[str, ...]]] = []
        for texts, arrays in ((op.operands, operands), (op.results, results)):
            named.append([])
            for text, array in zip(texts, arrays, strict=True):
                if array is None:
                    continue
                names = _names(text, stored(array).ndim)
                named[-1].append(names)
                if is_quantised(array):
                    axes = list(zip(names, array.scale.shape, array.shape, strict=True))
                    for name, tiles, size in axes:
                        if tiles != size:
                            pieces[name] = size if tiles == 1 else tiles
                    scales = tuple(_name_of_tiles(*axis) for axis in axes)
                    named[-1] += [scales] * (len(jax.tree.leaves(array)) - 1)
        every = dict.fromkeys(itertools.chain(*named[0], *named[1]))
        contracted = (name for name in every if name.rstrip("0123456789") == op.contracted)
        return cls(named[0], named[1], tuple(contracted), pieces)

    def shard(self, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Shard:
        """Returns how the devices of a mesh share a call whose arrays are to be sharded by these
        specs.

        An axis of the mesh goes to one named axis. A contracted one comes first where all operands
        agree on it, then the leading ones, and then the others: under FSDP rows and weights are
        sharded over the same axis of the mesh, and weights are what is gathered.
        """
        of_operands = list(zip(self.operands, operands, strict=True))
        agreed: list[tuple[str, tuple[str, ...]]] = []
        for name in reversed(self.contracted):
            every = [
                dict(zip(names, map(_axes, spec), strict=False)).get(name, ())
                for names, spec in of_operands
                if name in names
            ]
            agreed.append((name, tuple(a for a in every[0] if all(a in one for one in every))))
        others: list[tuple[str, tuple[str, ...]]] = []
        for names, spec in (*zip(self.results, results, strict=True), *of_operands):
            others += zip(names, map(_axes, spec), strict=False)
        others.sort(key=lambda one: not one[0].startswith("t"))
        found: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for name, axes in agreed + others:
            free = tuple(axis for axis in axes if axis not in used)
            is_whole = name in WHOLE or name.isupper()
            if free and name not in found and not is_whole and self._divides(mesh, free, name):
                found[name] = free
                used.update(free)
        found |= {name.upper(): found[name] for name in self.pieces if name in found}
        gathered = any(
            set(_axes(entry)) - set(found.get(name, ()))
            for names, spec in of_operands
            for name, entry in zip(names, spec, strict=False)
            if len(names) > 1
        )
        summed = tuple(a for name in self.contracted for a in found.get(name, ()))
        return Shard(tuple(found.items()), summed, gathered)

    def _divides(self, mesh: Mesh, axes: Sequence[str], name: str) -> bool:
        return self.pieces.get(name, 0) % math.prod(mesh.shape[axis] for axis in axes) == 0

    def cut(
        self, shard: Shard, sizes: Sequence[tuple[int, ...]], operands: Sequence[Any]
    ) -> list[Any]:
        """Returns a device's parts of the operands, whose whole sizes are given, with zeros where a
        contracted axis ends before the part does: XLA pads with whatever it finds."""
        return [
            self._without_padding(shard, names, size, operand)
            for names, size, operand in zip(self.operands, sizes, operands, strict=True)
        ]

    def _without_padding(self, shard: Shard, names: Sequence[str], whole: Any, part: Any) -> Any:
        for axis, name in enumerate(names):
            size, over = part.shape[axis], shard.over(name)
            if name not in self.contracted or not over:
                continue
            if size * lax.axis_size(over) == whole[axis]:
                continue
            index = lax.broadcasted_iota(jnp.int32, part.shape, axis) + shard.start(name, size)
            part = jnp.where(index < whole[axis], part, jnp.zeros((), part.dtype))
        return part


def spec(names: Sequence[str], shard: Shard) -> jax.sharding.PartitionSpec:
    """Returns how an array of these axes is sharded."""
    return jax.P(*(shard.over(name) or None for name in names))


def _names(text: str, rank: int) -> tuple[str, ...]:
    names = text.split()
    if names[:1] == ["t"]:
        names[:1] = [f"t{axis}" for axis in range(rank - len(names) + 1)]
    return tuple(names)


def _name_of_tiles(name: str, tiles: int, size: int) -> str:
    """Returns the name of an axis of scales, of which there are so many for an axis of `size`."""
    if tiles == size:
        return name
    return f"one_{name}" if tiles == 1 else name.upper()


def _axes(entry: Any) -> tuple[str, ...]:
    """Returns the axes of the mesh in one entry of a PartitionSpec."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple) else ()
