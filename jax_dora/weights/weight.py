"""A weight as a program sees it on the way from its parameter to what reads it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import core

from jax_dora.weights.operations import Lookup, Product, Ragged
from jax_dora.weights.view import View

# What the axes of each array are: the weight's own by their roles, and the rank.
_ORDERS = {"kernel": None, "lora_a": "bir", "lora_b": "bro", "g": "bo"}


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
      view: which axes of the weight it has.
      roles: of each axis of the weight: "b", matrices lie along it; "i", it is contracted; "o", it
        is of features. None where they are not known yet.
      arrays: the kernel with all of the weight's axes, sliced, cast and scaled as the array is. And
        where roles are known, sliced alike, lora_a [*b, *i, r], lora_b [*b, r, *o], and g
        [*b, *o].
      reader: what is done where it is read.
      stacked: the axes of the weight that a scan has taken apart.
    """

    view: View
    roles: str | None
    arrays: Mapping[str, jax.Array]
    reader: Reader
    stacked: frozenset[int] = frozenset()

    @property
    def kernel(self) -> jax.Array:
        """The kernel, with all of the weight's axes."""
        return self.arrays["kernel"]

    @property
    def aval(self) -> Any:
        """The abstract value of the array."""
        return core.ShapedArray(self.view.shape, self.kernel.dtype)

    def axes(self, role: str) -> tuple[int, ...]:
        """Returns the axes of the weight that have this role."""
        return tuple(axis for axis, one in enumerate(self.roles or "") if one == role)

    def base(self) -> jax.Array:
        """Returns the array without its adapter."""
        return self.laid_out(self.kernel)

    def laid_out(self, kernel: jax.Array) -> jax.Array:
        """Returns an array with the weight's axes as the view has them."""
        pieces = [
            piece
            for axis in range(kernel.ndim)
            for piece in sorted(
                (one for one in self.view.pieces(range(len(self.view.axes))) if one.axis == axis),
                key=lambda piece: -piece.stride,
            )
        ]
        order = [pieces.index(piece) for axis in self.view.axes for piece in axis]
        if tuple(order) != tuple(range(len(order))):
            kernel = kernel.reshape([piece.size for piece in pieces]).transpose(order)
        return kernel if kernel.shape == self.view.shape else kernel.reshape(self.view.shape)

    def seen(self, view: View | None) -> "Weight | None":
        """Returns the same array in another view."""
        return None if view is None else dataclasses.replace(self, view=view)

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
        whole = self.view.whole(axis)
        if whole is None:
            return None
        changed = {
            name: function(array, place)
            for name, array in self.arrays.items()
            if (place := self.place(name, whole)) is not None
        }
        view = self.view.resized(axis, changed["kernel"].shape[whole])
        return dataclasses.replace(self, view=view, arrays={**self.arrays, **changed})

    def place(self, name: str, axis: int) -> int | None:
        """Returns which axis of the array `name` is the weight's `axis`, or None."""
        order = _ORDERS[name]
        if order is None:
            return axis
        assert self.roles is not None
        place = 0
        for role in order:
            if role == "r":
                place += 1
            elif self.roles[axis] == role:
                return place + self.axes(role).index(axis)
            else:
                place += len(self.axes(role))
        return None


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
