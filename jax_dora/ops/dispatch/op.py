"""An operator, and the names of the axes of its arrays.

An operator names the axes of its operands and results, as an einsum does. A device works on one
block of every named axis. A result without the contracted axis is summed over the devices that the
contracted axis is sharded over.

A quantised operand is named like a plain one. Its scales have an axis for each of its axes: "one_"
+ the name if there is a single scale, the name itself if every element has a scale of its own, and
the name in capitals if the axis is tiled. A tiled axis is sharded in whole tiles over a number of
devices that divides the number of tiles, or not at all. An axis with a single scale is sharded only
over a number of devices that divides it: XLA pads codes with zeros, which stand for other numbers
in some formats.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.dispatch.shard import Shard, mesh_axes, spec
from jax_dora.ops.quantised import is_quantised, stored

# The names of axes that are never sharded: the rank, a seed, and single scales.
UNSHARDED = frozenset({"r", "s", "one_i", "one_o"})


class Op(NamedTuple):
    """An operator: its computation on one device, and the names of its arrays' axes.

    Names are separated by spaces. "t" stands for all leading axes, "r" for the rank, "s" for the
    axis of a seed.

    Attributes:
      name: the name that JAX programs show.
      run: `(settings, shard, operands) -> results`. The settings are a NamedTuple of hashable
        values, by whose `implementation` the kernel is chosen.
      operands: the axis names of each field of the operands. For a field that may hold a tuple of
        arrays, a tuple; its first names are those of an array that is alone.
      results: the axis names of each result.
      contracted: the axis that is summed over in results without it.
      is_projection: whether it multiplies rows by a whole kernel [in, out].
      gathers: `(settings) -> the axis names of the matrix that it gathers itself`, by
        `Shard.gather`, or None. Others are gathered before, along either axis, which moves them
        once more.
      for_types: `(settings) -> settings` with which it has results of the same types and is traced
        in less time, or None.
      is_constant: whether its results are constants for differentiation.
    """

    name: str
    run: Callable[[Any, Shard, Any], tuple[Any, ...]]
    operands: tuple[Any, ...]
    results: tuple[str, ...]
    contracted: str = ""
    is_projection: bool = False
    gathers: Callable[[Any], str | None] | None = None
    for_types: Callable[[Any], Any] | None = None
    is_constant: bool = False

    def __repr__(self) -> str:
        return self.name

    def named(self, operands: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        """Yields the axis names of every operand, and the operand; of every part of a tuple."""
        for text, operand in zip(self.operands, operands, strict=False):
            parts = operand if isinstance(operand, tuple) else (operand,)
            yield from zip(text if isinstance(text, tuple) else (text,), parts, strict=False)

    def on_explicit_axes(
        self, function: Callable[[Any], jax.Array], operands: Any
    ) -> Callable[[Any], jax.Array]:
        """Returns `function`, which computes the first result from `operands`, for a mesh with
        explicit axes. The result is sharded like the first two operands. If these disagree, or both
        factors of a projection are sharded along the summed axis, JAX raises its own error."""
        first = [stored(part[0] if isinstance(part, tuple) else part) for part in operands[:2]]
        return meshes.on_explicit_axes(function, lambda: self._result_spec(first), *first)

    def _result_spec(self, operands: Sequence[jax.Array]) -> jax.sharding.PartitionSpec | None:
        sharded: dict[str, list[Any]] = {}
        for text, array in self.named(operands):
            for name, axes in zip(_names(text, array.ndim), meshes.spec(array), strict=True):
                sharded.setdefault(name, []).extend([axes] if axes else [])
        found = [sharded[name] for name in _names(self.results[0], operands[0].ndim)]
        axes = jax.tree.leaves([entries[:1] for entries in found])
        is_ambiguous = (
            any(len(set(entries)) > 1 for entries in found)
            or len(axes) > len(set(axes))
            or (self.is_projection and len(sharded[self.contracted]) > 1)
        )
        return None if is_ambiguous else jax.P(*(next(iter(entries), None) for entries in found))


class Names(NamedTuple):
    """The axis names of every array in a call, a tuple for each array.

    Attributes:
      operands, results: the names of each array that is not None. A quantised operand has several
        arrays: its codes, its scales, and its zero points if it has them.
      contracted: the axes that are summed over.
      tile_counts: for axes of quantised operands, the number of blocks that a device must hold
        whole: the number of tiles, or with a single scale the number of elements.
      apart: the index and the shape of the operand that the operator gathers itself, or None.
    """

    operands: list[tuple[str, ...]]
    results: list[tuple[str, ...]]
    contracted: tuple[str, ...]
    tile_counts: dict[str, int]
    apart: tuple[int, tuple[int, ...]] | None = None

    @classmethod
    def of(cls, op: Op, settings: Any, operands: Sequence[Any], results: Sequence[Any]) -> "Names":
        """Returns the axis names of a call.

        Args:
          op, settings: the operator and the settings of the call.
          operands, results: arrays or their types, or None.
        """
        tile_counts: dict[str, int] = {}
        named: list[list[tuple[str, ...]]] = []
        gathers, apart = op.gathers and op.gathers(settings), None
        for pairs in (op.named(operands), zip(op.results, results, strict=True)):
            named.append([])
            for text, array in pairs:
                if array is None:
                    continue
                names = _names(text, stored(array).ndim)
                if gathers and text == gathers and len(named) == 1:
                    apart = len(named[-1]), array.shape
                named[-1].append(names)
                if is_quantised(array):
                    axes = list(zip(names, array.scale.shape, array.shape, strict=True))
                    scales = tuple(_scale_axis_name(*axis) for axis in axes)
                    for (name, tiles, size), of_scale in zip(axes, scales, strict=True):
                        if of_scale != name:
                            tile_counts[name] = size if tiles == 1 else tiles
                    named[-1] += [scales] * (len(jax.tree.leaves(array)) - 1)
        all_names = dict.fromkeys(itertools.chain(*named[0], *named[1]))
        contracted = (name for name in all_names if name.rstrip("0123456789") == op.contracted)
        return cls(named[0], named[1], tuple(contracted), tile_counts, apart)

    def shard(self, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> Shard:
        """Returns how a call is sharded over a mesh.

        A mesh axis is assigned to one named axis. The contracted axes come first, for mesh axes
        that all operands with the contracted axis are sharded over; then the leading axes; then the
        others. Under FSDP rows and weights are sharded over the same mesh axis: this order keeps
        the rows sharded and gathers the weights.

        Args:
          mesh: the mesh.
          operands, results: the PartitionSpecs that XLA proposes for the arrays.
        """
        operand_specs = list(zip(self.operands, operands, strict=True))
        proposals: list[tuple[str, tuple[str, ...]]] = []
        for name in reversed(self.contracted):
            proposed = [
                dict(zip(names, map(mesh_axes, entries), strict=False)).get(name, ())
                for names, entries in operand_specs
                if name in names
            ]
            agreed = (axis for axis in proposed[0] if all(axis in axes for axes in proposed))
            proposals.append((name, tuple(agreed)))
        others: list[tuple[str, tuple[str, ...]]] = []
        for names, entries in (*zip(self.results, results, strict=True), *operand_specs):
            others += zip(names, map(mesh_axes, entries), strict=False)
        others.sort(key=lambda proposal: not proposal[0].startswith("t"))
        assigned: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for name, axes in proposals + others:
            free = tuple(axis for axis in axes if axis not in used)
            can_shard = name not in UNSHARDED and not name.isupper()
            if free and name not in assigned and can_shard and self._divides(mesh, free, name):
                assigned[name] = free
                used.update(free)
        assigned |= {name.upper(): assigned[name] for name in self.tile_counts if name in assigned}
        gathered = any(
            set(mesh_axes(entry)) - set(assigned.get(name, ()))
            for names, entries in operand_specs
            for name, entry in zip(names, entries, strict=False)
            if len(names) > 1
        )
        summed = tuple(axis for name in self.contracted for axis in assigned.get(name, ()))
        apart = self._apart(mesh, assigned, operands)
        return Shard(tuple(assigned.items()), summed, gathered, apart)

    def _apart(
        self, mesh: Mesh, assigned: dict[str, tuple[str, ...]], operands: Sequence[Any]
    ) -> tuple[int, tuple[str, ...]] | None:
        """Returns `Shard.apart`: along which axis a device has a part of the matrix that the
        operator gathers, if there is one such axis, in equal parts."""
        if self.apart is None:
            return None
        index, shape = self.apart
        names, found = self.operands[index], []
        for axis, (name, entry) in enumerate(zip(names, operands[index], strict=False)):
            over = tuple(one for one in mesh_axes(entry) if one not in assigned.get(name, ()))
            if over:
                found.append((axis, over))
        if len(found) != 1:
            return None
        [(axis, over)] = found
        parts = math.prod(mesh.shape[one] for one in over)
        kept = {one for name in names for one in assigned.get(name, ())}
        if names[axis] in assigned or kept & {*over} or shape[axis] % parts:
            return None
        return axis, over

    def operand_specs(self, shard: Shard) -> list[jax.sharding.PartitionSpec]:
        """Returns how a device's operands are sharded."""
        specs = [spec(names, shard) for names in self.operands]
        if self.apart is not None and shard.apart is not None:
            (index, _), (axis, over) = self.apart, shard.apart
            entries = [shard.mesh_axes(name) for name in self.operands[index]]
            entries[axis] = over
            specs[index] = jax.P(*(axes or None for axes in entries))
        return specs

    def _divides(self, mesh: Mesh, axes: Sequence[str], name: str) -> bool:
        """Returns whether the devices along mesh axes divide the tiles of a named axis evenly."""
        return self.tile_counts.get(name, 0) % math.prod(mesh.shape[axis] for axis in axes) == 0

    def zero_padding(
        self, shard: Shard, shapes: Sequence[tuple[int, ...]], operands: Sequence[Any]
    ) -> Iterator[jax.Array]:
        """Yields a device's operands with zeros in the padding of contracted axes: XLA pads the
        last shard of an axis that the devices do not divide with arbitrary values. `shapes` are
        those of the whole arrays."""
        for names, shape, array in zip(self.operands, shapes, operands, strict=True):
            for axis, name in enumerate(names):
                size, mesh_axes = array.shape[axis], shard.mesh_axes(name)
                if name not in self.contracted or not mesh_axes:
                    continue
                if size * lax.axis_size(mesh_axes) != shape[axis]:
                    index = lax.broadcasted_iota(jnp.int32, array.shape, axis)
                    is_inside = index + shard.start(name, size) < shape[axis]
                    array = jnp.where(is_inside, array, jnp.zeros((), array.dtype))
            yield array


def _names(text: str, ndim: int) -> tuple[str, ...]:
    """Returns one name for each of the `ndim` axes of an array; "t" stands for several."""
    names = text.split()
    if names[:1] == ["t"]:
        names[:1] = [f"t{axis}" for axis in range(ndim - len(names) + 1)]
    return tuple(names)


def _scale_axis_name(name: str, tiles: int, size: int) -> str:
    """Returns the name of an axis of `tiles` scales that belongs to an axis of `size` elements."""
    if tiles == 1:
        return f"one_{name}"
    return name if tiles == size else name.upper()
