"""`Weight`: a weight between its parameter and the operations that read it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import core, lax

from jax_dora.layers.contraction import Contraction
from jax_dora.ops.dtypes import accumulation_dtype

# The axes of the adapter's arrays, as roles of the weight's axes; "r" is the rank axis.
_ORDERS = {"lora_a": "bir", "lora_b": "bro", "g": "bo"}


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """A product of an array x and a weight, as in `jax.lax.dot_general`, with the result's dtype
    and its sharding or None; `weight_first` if the weight is the left operand."""

    dimension_numbers: Any
    weight_first: bool
    precision: Any
    dtype: Any
    out_sharding: Any

    def __call__(self, x: jax.Array, weight: jax.Array, **options: Any) -> jax.Array:
        """Returns the product; `options` are passed to `jax.lax.dot_general`."""
        operands = (weight, x) if self.weight_first else (x, weight)
        return lax.dot_general(*operands, self.dimension_numbers, **options)

    def contraction(self, ndim: int, weight_ndim: int) -> Contraction:
        """Returns the contraction of an x and a weight's array with these numbers of axes."""
        return Contraction.of_dot_general(
            self.dimension_numbers, ndim, weight_ndim, weight_first=self.weight_first
        )


@dataclasses.dataclass(frozen=True)
class RaggedDot:
    """A product of groups of rows, each with its own matrix: the `contracted` axes of the weight's
    array, its `group` axis, and the number of rows in each group, i32[groups]; else a `DotGeneral`.
    """

    contracted: tuple[int, ...]
    group: int
    sizes: jax.Array
    precision: Any
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A lookup of rows along `axis` of the weight's array; `offset_dims` are the axes of the result
    that are its other axes; mode and fill_value as in `jax.lax.gather`."""

    axis: int
    offset_dims: tuple[int, ...]
    mode: Any
    fill_value: Any


class Reader(Protocol):
    """Computes the operations that read a weight."""

    def dot_general(self, weight: "Weight", product: DotGeneral, x: jax.Array) -> jax.Array | None:
        """Returns the product of `x` and the weight, or None if it is not supported."""
        ...

    def ragged_dot(self, weight: "Weight", product: RaggedDot, x: jax.Array) -> jax.Array | None:
        """Returns the ragged product of rows `x` and several matrices, or None if it is not
        supported."""
        ...

    def lookup(self, weight: "Weight", lookup: Lookup, indices: jax.Array) -> jax.Array | None:
        """Returns the rows of the weight at `indices`, or None if it is not supported."""
        ...

    def other(self, weight: "Weight", name: str) -> jax.Array:
        """Returns the whole array, for any other operation `name`."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["view", "sizes", "origins", "roles", "reader", "stacked"],
)
@dataclasses.dataclass(frozen=True)
class Weight:
    """A view of a weight: perhaps cast, scaled, transposed, reshaped or sliced. A pytree of its
    arrays.

    A reshape may split an axis of the weight into several parts, or merge parts of several axes
    into one axis of the view. So each axis of the view is a list of parts. For example, a weight
    [6, 4] reshaped to [2, 12] has the parts 0 and 1 of axis 0 and the part 2 of axis 1:

        sizes = (2, 3, 4), origins = (0, 0, 1), view = ((0,), (1, 2))

    Attributes:
      view: for each axis of the view, the numbers of the parts that form it, outermost first. Parts
        of size 1 may be missing, so that axes of size 1 can be inserted and removed freely.
      sizes, origins: for each part, in the weight's order, its size and the weight's axis that it
        belongs to.
      roles: one letter for each axis of the weight: "b" (batch axis: one matrix for each index),
        "i" (input axis, contracted) or "o" (output axis, features). None while the roles are
        unknown.
      arrays: "kernel", with all axes of the weight, sliced, cast and scaled like the view. If the
        roles are known also "lora_a" [*b, *i, r], "lora_b" [*b, r, *o] and "g" [*b, *o], sliced
        alike.
      reader: computes the operations that read the weight.
      stacked: the axes of the weight that scans have iterated over, outermost scan first.
    """

    view: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    origins: tuple[int, ...]
    roles: str | None
    arrays: Mapping[str, jax.Array]
    reader: Reader
    stacked: tuple[int, ...] = ()

    @classmethod
    def of(cls, roles: str | None, arrays: Mapping[str, jax.Array], reader: Reader) -> Self:
        """Returns the view of the whole, unchanged weight."""
        sizes = arrays["kernel"].shape
        parts = tuple(range(len(sizes)))
        return cls(tuple((part,) for part in parts), sizes, parts, roles, arrays, reader)

    @property
    def kernel(self) -> jax.Array:
        return self.arrays["kernel"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The view's shape."""
        return tuple(math.prod(self.sizes[part] for part in parts) for parts in self.view)

    @property
    def aval(self) -> Any:
        return core.ShapedArray(self.shape, self.kernel.dtype)

    def contraction(self, x: Sequence[Any] = (), y: Sequence[Any] = ()) -> Contraction:
        """Returns the contraction of an adapted weight with axes x and y, whose labels are the
        parts' numbers."""
        roles = "".join((self.roles or "")[axis] for axis in self.origins)
        rank = self.arrays["lora_a"].shape[-1]
        return Contraction(tuple(range(len(roles))), roles, self.sizes, rank, x, y)

    def axes(self, role: str) -> tuple[int, ...]:
        """Returns the weight's axes with this role."""
        return tuple(axis for axis, letter in enumerate(self.roles or "") if letter == role)

    def parts(self, role: str) -> tuple[int, ...]:
        """Returns the parts of the weight's axes with this role."""
        axes = self.axes(role)
        return tuple(part for part, axis in enumerate(self.origins) if axis in axes)

    def nontrivial_parts(self, role: str) -> list[int]:
        """Returns the parts of the axes with this role, without parts of size 1."""
        return [part for part in self.parts(role) if self.sizes[part] != 1]

    def parts_of_axes(self, axes: Sequence[int]) -> list[int]:
        """Returns the parts that form these axes of the view, without parts of size 1."""
        return [part for axis in axes for part in self.view[axis] if self.sizes[part] != 1]

    def whole_part(self, axis: int) -> int | None:
        """Returns the part that forms the view's axis `axis`, if this is a single part and a whole
        axis of the weight; else None."""
        parts = self.view[axis]
        is_whole = len(parts) == 1 and self.origins.count(self.origins[parts[0]]) == 1
        return parts[0] if is_whole else None

    def base(self) -> jax.Array:
        """Returns the view's array without the adapter."""
        return self.apply_view(self.kernel)

    def apply_view(self, kernel: jax.Array) -> jax.Array:
        """Reshapes and transposes an array with the weight's axes to the shape of the view."""
        order = self.parts_of_axes(range(len(self.view)))
        short = [part for part in range(len(self.sizes)) if part not in order]
        return kernel.reshape(self.sizes).transpose((*order, *short)).reshape(self.shape)

    def transpose(self, order: Sequence[int]) -> "Weight":
        """Returns a view with these axes, in this order. Axes of size 1 may be missing."""
        return dataclasses.replace(self, view=tuple(self.view[axis] for axis in order))

    def place_axes(self, axes: Sequence[int], ndim: int) -> "Weight":
        """Returns a view of `ndim` axes: those of this view at `axes`, and others of size 1."""
        by_axis = dict(zip(axes, self.view, strict=True))
        return dataclasses.replace(self, view=tuple(by_axis.get(axis, ()) for axis in range(ndim)))

    def reshape(self, shape: Sequence[int]) -> "Weight | None":
        """Returns the view reshaped in row-major order; None if the new axes do not divide the
        parts, or the parts the new axes, evenly."""
        order = self.parts_of_axes(range(len(self.view)))
        # Merge parts of one axis that are also neighbours in the view.
        runs: list[list[int]] = []
        for part, origin in enumerate(self.origins):
            is_adjacent = (part - 1, part) in itertools.pairwise(order)
            if is_adjacent and origin == self.origins[part - 1]:
                runs[-1].append(part)
            else:
                runs.append([part])
        numbers = {run[0]: number for number, run in enumerate(runs)}
        lengths = [math.prod(self.sizes[part] for part in run) for run in runs]
        # Fill the new axes in order with whole runs, or with pieces of runs.
        queue = [(numbers[part], lengths[numbers[part]]) for part in order if part in numbers]
        pieces: list[list[int]] = [[] for _ in runs]
        view: list[list[tuple[int, int]]] = []
        for remaining in shape:
            view.append([])
            while remaining > 1:
                if not queue:
                    return None
                run, length = queue.pop(0)
                size = math.gcd(remaining, length)
                if size not in (remaining, length):
                    return None
                view[-1].append((run, len(pieces[run])))
                pieces[run].append(size)
                if size < length:
                    queue.insert(0, (run, length // size))
                remaining //= size
        if queue:
            return None
        pieces = [sizes or [1] for sizes in pieces]
        starts = [0, *itertools.accumulate(map(len, pieces))]
        pairs = zip(runs, pieces, strict=True)
        return dataclasses.replace(
            self,
            view=tuple(tuple(starts[run] + number for run, number in axis) for axis in view),
            sizes=tuple(itertools.chain(*pieces)),
            origins=tuple(self.origins[run[0]] for run, sizes in pairs for _ in sizes),
        )

    def with_part_size(
        self, part: int, arrays: Mapping[str, jax.Array], view: tuple[tuple[int, ...], ...]
    ) -> "Weight":
        """Returns the weight with these arrays and this view, and with the size of `part` taken
        from the arrays."""
        size = arrays["kernel"].shape[self.origins[part]]
        sizes = (*self.sizes[:part], size, *self.sizes[part + 1 :])
        return dataclasses.replace(self.with_arrays(arrays), view=view, sizes=sizes)

    def with_arrays(self, arrays: Mapping[str, jax.Array]) -> "Weight":
        """Returns the weight with some of its arrays replaced."""
        return dataclasses.replace(self, arrays={**self.arrays, **arrays})

    def map_linear(self, function: Callable[[jax.Array], jax.Array]) -> "Weight":
        """Applies the linear function `function` to the weight, by applying it to kernel and
        lora_b."""
        names = self.arrays.keys() & {"kernel", "lora_b"}
        return self.with_arrays({name: function(self.arrays[name]) for name in sorted(names)})

    def cast(self, dtype: Any) -> "Weight":
        """Returns the weight in another dtype. Only the kernel is cast."""
        return self.with_arrays({"kernel": self.kernel.astype(dtype)})

    def slice_axis(
        self, axis: int, function: Callable[[jax.Array, int], jax.Array]
    ) -> "Weight | None":
        """Returns a slice of the view along `axis`, which stays, or None if that is not a whole
        axis of the weight. `function` takes an array and one of its axes, and returns the slice
        along it."""
        part = self.whole_part(axis)
        if part is None:
            return None
        sliced = {
            name: function(array, array_axis)
            for name, array in self.arrays.items()
            if (array_axis := self.axis_in(name, self.origins[part])) is not None
        }
        return self.with_part_size(part, sliced, self.view)

    def axis_in(self, name: str, axis: int) -> int | None:
        """Returns the axis of the array `name` that corresponds to the weight's `axis`; None if
        there is none."""
        if name == "kernel":
            return axis
        axes = [
            own for role in _ORDERS[name] for own in (self.axes(role) if role != "r" else (-1,))
        ]
        return axes.index(axis) if axis in axes else None


def effective_weight(weight: Weight, scale: float) -> jax.Array:
    """Returns W' = W + ((g-1)∘W + g∘(s·lora_a lora_b)) in the shape of the view, computed in fp32
    and cast once."""
    roles = weight.roles
    assert roles is not None
    b, i, o = (weight.axes(role) for role in "bio")
    letters = dict(zip((*b, *i, *o), "abcdefghijklmnopqrstuvw", strict=False))
    named = {axes: "".join(letters[axis] for axis in axes) for axes in (b, i, o)}
    kernel = "".join(letters[axis] for axis in range(len(roles)))
    wide = accumulation_dtype(weight.kernel.dtype)
    change = scale * jnp.einsum(
        f"{named[b]}{named[i]}z,{named[b]}z{named[o]}->{kernel}",
        weight.arrays["lora_a"].astype(wide),
        weight.arrays["lora_b"].astype(wide),
        precision=jax.lax.Precision.HIGHEST,
    )
    # g is [*b, *o]; its transpose has these axes in the weight's order.
    order = sorted(range(len(b + o)), key=lambda index: (b + o)[index])
    g = jnp.expand_dims(weight.arrays["g"].astype(wide).transpose(order), i)
    base = weight.kernel.astype(wide)
    merged = base + ((g - 1) * base + g * change)
    return weight.apply_view(merged.astype(weight.kernel.dtype))
