"""A weight as a program sees it on the way from its parameter to what reads it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import core

from jax_dora.ops.compose import accumulator
from jax_dora.weights.operations import Lookup, Product, Ragged

# What the axes of each array but the kernel are: the weight's own by their roles, and the rank.
_ORDERS = {"lora_a": "bir", "lora_b": "bro", "g": "bo"}


class Reader(Protocol):
    """Computes the operations by which a program reads a weight."""

    def product(self, weight: "Weight", product: Product, x: jax.Array) -> jax.Array | None:
        """Returns the product of `x` and the weight, or None where it has no adapted form."""
        ...

    def ragged(self, weight: "Weight", product: Ragged, x: jax.Array) -> jax.Array | None:
        """Returns the ragged product of rows `x` and a stack of matrices, or None."""
        ...

    def lookup(self, weight: "Weight", lookup: Lookup, indices: jax.Array) -> jax.Array | None:
        """Returns the rows of the weight at `indices`, or None."""
        ...

    def other(self, weight: "Weight", name: str) -> jax.Array:
        """Returns the whole array, for any other operation, called `name`."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["view", "sizes", "origins", "roles", "reader", "stacked"],
)
@dataclasses.dataclass(frozen=True)
class Weight:
    """An array that is a weight's, perhaps cast, scaled, transposed, reshaped or indexed: a pytree
    of its arrays.

    Attributes:
      view: for each axis of the array the parts of the weight's axes that it is made of, outermost
        first. Parts of size 1 are in none, so that what is squeezed or inserted needs no account.
      sizes, origins: of each part, in the weight's order: its size, and the axis that it is of.
      roles: of each axis of the weight: "b", matrices lie along it; "i", it is contracted; "o", it
        is of features. None where they are not known yet.
      arrays: the kernel with all of the weight's axes, sliced, cast and scaled as the array is. And
        where roles are known, sliced alike, lora_a [*b, *i, r], lora_b [*b, r, *o], and g
        [*b, *o].
      reader: what is done where it is read.
      stacked: the axes of the weight that a scan has taken apart.
    """

    view: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    origins: tuple[int, ...]
    roles: str | None
    arrays: Mapping[str, jax.Array]
    reader: Reader
    stacked: frozenset[int] = frozenset()

    @classmethod
    def of(cls, roles: str | None, arrays: Mapping[str, jax.Array], reader: Reader) -> Self:
        """Returns the weight itself."""
        sizes = arrays["kernel"].shape
        view = tuple((axis,) if size != 1 else () for axis, size in enumerate(sizes))
        return cls(view, sizes, tuple(range(len(sizes))), roles, arrays, reader)

    @property
    def kernel(self) -> jax.Array:
        return self.arrays["kernel"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(math.prod(self.sizes[part] for part in parts) for parts in self.view)

    @property
    def aval(self) -> Any:
        return core.ShapedArray(self.shape, self.kernel.dtype)

    def axes(self, role: str) -> tuple[int, ...]:
        """Returns the axes of the weight that have this role."""
        return tuple(axis for axis, one in enumerate(self.roles or "") if one == role)

    def parts(self, role: str) -> tuple[int, ...]:
        """Returns the parts of these axes."""
        axes = self.axes(role)
        return tuple(part for part, axis in enumerate(self.origins) if axis in axes)

    def nontrivial_parts(self, role: str) -> list[int]:
        """Returns the parts of these axes that are longer than 1."""
        return [part for part in self.parts(role) if self.sizes[part] != 1]

    def parts_of_axes(self, axes: Sequence[int]) -> list[int]:
        """Returns the parts that these axes of the array are made of."""
        return [part for axis in axes for part in self.view[axis]]

    def whole_part(self, axis: int) -> int | None:
        """Returns the only part of the array's axis `axis` where that is the whole of one of the
        weight's, or None."""
        parts = self.view[axis]
        is_whole = len(parts) == 1 and self.origins.count(self.origins[parts[0]]) == 1
        return parts[0] if is_whole else None

    def base(self) -> jax.Array:
        """Returns the array without its adapter."""
        return self.apply_view(self.kernel)

    def apply_view(self, kernel: jax.Array) -> jax.Array:
        """Returns an array with the weight's axes as the view has them."""
        order = self.parts_of_axes(range(len(self.view)))
        short = [part for part in range(len(self.sizes)) if part not in order]
        return kernel.reshape(self.sizes).transpose((*order, *short)).reshape(self.shape)

    def transpose(self, order: Sequence[int]) -> "Weight":
        return dataclasses.replace(self, view=tuple(self.view[axis] for axis in order))

    def reshape(self, shape: Sequence[int]) -> "Weight | None":
        """Returns the array in row-major order in another shape, or None where an axis of it
        would hold a part of an axis that does not divide it."""
        order = self.parts_of_axes(range(len(self.view)))
        # Parts of an axis that are neighbours in the array too are one again.
        runs: list[list[int]] = []
        for part, origin in enumerate(self.origins):
            follows = (part - 1, part) in itertools.pairwise(order)
            if follows and origin == self.origins[part - 1]:
                runs[-1].append(part)
            else:
                runs.append([part])
        numbers = {run[0]: number for number, run in enumerate(runs)}
        lengths = [math.prod(self.sizes[part] for part in run) for run in runs]
        waiting = [(numbers[part], lengths[numbers[part]]) for part in order if part in numbers]
        cuts: list[list[int]] = [[] for _ in runs]
        view: list[list[tuple[int, int]]] = []
        for left in shape:
            view.append([])
            while left > 1:
                if not waiting:
                    return None
                run, length = waiting.pop(0)
                size = math.gcd(left, length)
                if size not in (left, length):
                    return None
                view[-1].append((run, len(cuts[run])))
                cuts[run].append(size)
                if size < length:
                    waiting.insert(0, (run, length // size))
                left //= size
        if waiting:
            return None
        cuts = [one or [1] for one in cuts]
        starts = [0, *itertools.accumulate(map(len, cuts))]
        pairs = zip(runs, cuts, strict=True)
        return dataclasses.replace(
            self,
            view=tuple(tuple(starts[run] + number for run, number in one) for one in view),
            sizes=tuple(itertools.chain(*cuts)),
            origins=tuple(self.origins[run[0]] for run, sizes in pairs for _ in sizes),
        )

    def with_part_size(
        self, part: int, arrays: Mapping[str, jax.Array], view: tuple[tuple[int, ...], ...]
    ) -> "Weight":
        """Returns the weight with these arrays and this view, whose `part` is as long as they
        are."""
        size = arrays["kernel"].shape[self.origins[part]]
        sizes = (*self.sizes[:part], size, *self.sizes[part + 1 :])
        return dataclasses.replace(self.with_arrays(arrays), view=view, sizes=sizes)

    def with_arrays(self, arrays: Mapping[str, jax.Array]) -> "Weight":
        """Returns the weight with these arrays in the place of its own."""
        return dataclasses.replace(self, arrays={**self.arrays, **arrays})

    def map_linear(self, function: Callable[[jax.Array], jax.Array]) -> "Weight":
        """Returns `function`, which is linear, of the array: of kernel and lora_b."""
        names = self.arrays.keys() & {"kernel", "lora_b"}
        return self.with_arrays({name: function(self.arrays[name]) for name in sorted(names)})

    def cast(self, dtype: Any) -> "Weight":
        """Returns the array in another dtype; only the kernel is cast."""
        return self.with_arrays({"kernel": self.kernel.astype(dtype)})

    def slice_axis(
        self, axis: int, function: Callable[[jax.Array, int], jax.Array]
    ) -> "Weight | None":
        """Returns a part of the array along `axis`, or None where it is not the whole of an axis.

        Args:
          axis: of the array; the part keeps it.
          function: takes an array and the number of its axis to the part along it.
        """
        whole = self.whole_part(axis)
        if whole is None:
            return None
        changed = {
            name: function(array, own_axis)
            for name, array in self.arrays.items()
            if (own_axis := self.axis_in(name, self.origins[whole])) is not None
        }
        is_long = changed["kernel"].shape[self.origins[whole]] != 1
        view = (*self.view[:axis], (whole,) if is_long else (), *self.view[axis + 1 :])
        return self.with_part_size(whole, changed, view)

    def axis_in(self, name: str, axis: int) -> int | None:
        """Returns which axis of the array `name` is the weight's `axis`, or None."""
        if name == "kernel":
            return axis
        axes = [
            one for role in _ORDERS[name] for one in (self.axes(role) if role != "r" else (-1,))
        ]
        return axes.index(axis) if axis in axes else None


def effective_weight(weight: Weight, scale: float) -> jax.Array:
    """Returns W' = W + ((g-1)∘W + g∘(s·lora_a lora_b)), evaluated in fp32 and cast once, as the
    view has it."""
    roles = weight.roles
    assert roles is not None
    b, i, o = (weight.axes(role) for role in "bio")
    letters = dict(zip((*b, *i, *o), "abcdefghijklmnopqrstuvw", strict=False))
    named = {axes: "".join(letters[axis] for axis in axes) for axes in (b, i, o)}
    kernel = "".join(letters[axis] for axis in range(len(roles)))
    wide = accumulator(weight.kernel.dtype)
    change = scale * jnp.einsum(
        f"{named[b]}{named[i]}z,{named[b]}z{named[o]}->{kernel}",
        weight.arrays["lora_a"].astype(wide),
        weight.arrays["lora_b"].astype(wide),
        precision=jax.lax.Precision.HIGHEST,
    )
    # g has the batch and feature axes in the weight's order of each role.
    order = sorted(range(len(b + o)), key=lambda index: (b + o)[index])
    g = jnp.expand_dims(weight.arrays["g"].astype(wide).transpose(order), i)
    base = weight.kernel.astype(wide)
    merged = base + ((g - 1) * base + g * change)
    return weight.apply_view(merged.astype(weight.kernel.dtype))
