"""A weight as a program sees it on the way from its parameter to what reads it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import core

from jax_dora.weights.operations import Lookup, Product, Ragged

# What the axes of each array are, by their roles, and the rank; the kernel's are in its own order.
_ORDERS = {"lora_a": "bir", "lora_b": "bro", "g": "bo"}


class Reader(Protocol):
    """What is done where a program reads a weight."""

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
        """Returns the whole array, for the operation `name` that is none of these."""
        ...


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array that is a weight's, perhaps cast, scaled, transposed, reshaped or indexed.

    Attributes:
      view: for each axis of the array the axes of the kernel that it is made of, outermost first.
        Axes of size 1 are made of none, so that what is squeezed or inserted needs no account.
      roles: of each axis of the kernel: "b", matrices lie along it; "i", it is contracted; "o", it
        is of features. None where they are not known yet.
      arrays: the kernel, sliced, cast and scaled as the array is; its axes are the weight's or
        parts of these, in the weight's order. And where roles are known, sliced and split alike,
        lora_a [*b, *i, r], lora_b [*b, r, *o], and g [*b, *o].
      reader: what is done where it is read.
      origins: the weight's axis that each axis of the kernel is, or is a part of.
      stacked: the axes of the weight that a scan has taken apart.
    """

    view: tuple[tuple[int, ...], ...]
    roles: str | None
    arrays: Mapping[str, jax.Array]
    reader: Reader
    origins: tuple[int, ...]
    stacked: frozenset[int] = frozenset()

    @classmethod
    def of(cls, roles: str | None, arrays: Mapping[str, jax.Array], reader: Reader) -> Self:
        """Returns the weight itself."""
        shape = arrays["kernel"].shape
        view = tuple((axis,) if size != 1 else () for axis, size in enumerate(shape))
        return cls(view, roles, arrays, reader, tuple(range(len(shape))))

    @property
    def kernel(self) -> jax.Array:
        """The kernel, with all of its axes."""
        return self.arrays["kernel"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(math.prod(self.kernel.shape[axis] for axis in axes) for axes in self.view)

    @property
    def aval(self) -> Any:
        """The abstract value of the array."""
        return core.ShapedArray(self.shape, self.kernel.dtype)

    def axes(self, role: str) -> tuple[int, ...]:
        """Returns the axes of the kernel that have this role."""
        return tuple(axis for axis, one in enumerate(self.roles or "") if one == role)

    def long_axes(self, role: str) -> list[int]:
        """Returns those of them that are longer than 1."""
        return [axis for axis in self.axes(role) if self.kernel.shape[axis] != 1]

    def viewed(self, axes: Sequence[int]) -> list[int]:
        """Returns the axes of the kernel that these axes of the array are made of."""
        return [one for axis in axes for one in self.view[axis]]

    def whole(self, axis: int) -> int | None:
        """Returns the axis of the kernel that axis `axis` of the array is, and that is an axis of
        the weight; or None."""
        axes = self.view[axis]
        is_whole = len(axes) == 1 and self.origins.count(self.origins[axes[0]]) == 1
        return axes[0] if is_whole else None

    def base(self) -> jax.Array:
        """Returns the array without its adapter."""
        return self.laid_out(self.kernel)

    def laid_out(self, kernel: jax.Array) -> jax.Array:
        """Returns an array with the kernel's axes as the view has them."""
        order = self.viewed(range(len(self.view)))
        short = [axis for axis in range(kernel.ndim) if axis not in order]
        return kernel.transpose((*order, *short)).reshape(self.shape)

    def transpose(self, order: Sequence[int]) -> "Weight":
        """Returns the array transposed."""
        return dataclasses.replace(self, view=tuple(self.view[axis] for axis in order))

    def reshape(self, shape: Sequence[int]) -> "Weight | None":
        """Returns the array in row-major order in another shape, or None where an axis of it
        would hold a part of an axis that does not divide it."""
        order = self.viewed(range(len(self.view)))
        # Parts of an axis that are neighbours in the array too are one axis again.
        runs: list[list[int]] = []
        for axis in range(self.kernel.ndim):
            follows = (axis - 1, axis) in itertools.pairwise(order)
            if follows and self.origins[axis] == self.origins[axis - 1]:
                runs[-1].append(axis)
            else:
                runs.append([axis])
        lengths = [math.prod(self.kernel.shape[axis] for axis in run) for run in runs]
        numbers = {run[0]: number for number, run in enumerate(runs)}
        waiting = [(numbers[one], lengths[numbers[one]]) for one in order if one in numbers]
        parts: list[list[int]] = [[] for _ in runs]
        view: list[list[tuple[int, int]]] = []
        for left in shape:
            view.append([])
            while left > 1:
                if not waiting:
                    return None
                run, length = waiting.pop(0)
                part = math.gcd(left, length)
                if part not in (left, length):
                    return None
                view[-1].append((run, len(parts[run])))
                parts[run].append(part)
                if part < length:
                    waiting.insert(0, (run, length // part))
                left //= part
        if waiting:
            return None
        sizes = [part or [1] for part in parts]
        starts = [0, *itertools.accumulate(map(len, sizes))]
        axes = tuple(tuple(starts[run] + part for run, part in one) for one in view)
        return self._split([run[0] for run in runs], sizes, axes)

    def _split(
        self, firsts: list[int], sizes: list[list[int]], view: tuple[tuple[int, ...], ...]
    ) -> "Weight":
        """Returns the weight whose kernel has axes of these sizes instead of each run of axes, of
        which `firsts` has the first."""
        origins = [
            self.origins[first] for first, its in zip(firsts, sizes, strict=True) for _ in its
        ]
        roles, arrays = self.roles, dict(self.arrays)
        arrays["kernel"] = self.kernel.reshape([size for its in sizes for size in its])
        if roles is not None:
            of_role = {role: list[int]() for role in "bio"}
            for first, its in zip(firsts, sizes, strict=True):
                of_role[roles[first]] += its
            of_role["r"] = [arrays["lora_a"].shape[-1]]
            for name, order in _ORDERS.items():
                arrays[name] = arrays[name].reshape([n for role in order for n in of_role[role]])
            roles = "".join(
                roles[first] for first, its in zip(firsts, sizes, strict=True) for _ in its
            )
        return Weight(view, roles, arrays, self.reader, tuple(origins), self.stacked)

    def scaled(self, function: Callable[[jax.Array], jax.Array]) -> "Weight":
        """Returns `function`, which is linear, of the array: of kernel and lora_b."""
        changed = {
            name: function(self.arrays[name])
            for name in ("kernel", "lora_b")
            if name in self.arrays
        }
        return dataclasses.replace(self, arrays={**self.arrays, **changed})

    def cast(self, dtype: Any) -> "Weight":
        """Returns the array in another dtype; only the kernel is cast."""
        return dataclasses.replace(
            self, arrays={**self.arrays, "kernel": self.kernel.astype(dtype)}
        )

    def indexed(
        self, axis: int, function: Callable[[jax.Array, int], jax.Array]
    ) -> "Weight | None":
        """Returns a part of the array along `axis`, or None where it is not the whole of an axis.

        Args:
          axis: of the array; the part keeps it.
          function: takes an array and the number of its axis to the part along it.
        """
        whole = self.whole(axis)
        if whole is None:
            return None
        changed = {
            name: function(array, place)
            for name, array in self.arrays.items()
            if (place := self.place(name, whole)) is not None
        }
        axes = (whole,) if changed["kernel"].shape[whole] != 1 else ()
        view = (*self.view[:axis], axes, *self.view[axis + 1 :])
        return dataclasses.replace(self, view=view, arrays={**self.arrays, **changed})

    def place(self, name: str, axis: int) -> int | None:
        """Returns which axis of the array `name` is the kernel's `axis`, or None."""
        if name == "kernel":
            return axis
        axes = [
            one for role in _ORDERS[name] for one in (self.axes(role) if role != "r" else (-1,))
        ]
        return axes.index(axis) if axis in axes else None


def effective(weight: Weight, scale: float) -> jax.Array:
    """Returns W' = W + ((g-1)∘W + g∘(s·lora_a lora_b)), evaluated in fp32 and cast once, as the
    view has it."""
    roles = weight.roles
    assert roles is not None
    b, i, o = (weight.axes(role) for role in "bio")
    letters = dict(zip((*b, *i, *o), "abcdefghijklmnopqrstuvw", strict=False))
    named = {axes: "".join(letters[axis] for axis in axes) for axes in (b, i, o)}
    kernel = "".join(letters[axis] for axis in range(len(roles)))
    wide = jnp.promote_types(weight.kernel.dtype, jnp.float32)
    change = scale * jnp.einsum(
        f"{named[b]}{named[i]}z,{named[b]}z{named[o]}->{kernel}",
        weight.arrays["lora_a"].astype(wide),
        weight.arrays["lora_b"].astype(wide),
        precision=jax.lax.Precision.HIGHEST,
    )
    # g has the batch and feature axes in the weight's order of each role.
    order = sorted(range(len(b + o)), key=lambda place: (b + o)[place])
    g = jnp.expand_dims(weight.arrays["g"].astype(wide).transpose(order), i)
    base = weight.kernel.astype(wide)
    merged = base + ((g - 1) * base + g * change)
    return weight.laid_out(merged.astype(weight.kernel.dtype))
