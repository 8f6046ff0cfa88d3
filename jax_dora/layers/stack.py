"""The axes along which `nnx.vmap` has stacked layers in the arrays of one module."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Stack:
    """The axes that a stack of layers adds to each parameter of one layer.

    Attributes:
      shape: their sizes; () for a single layer.
      axis: 0, they are the leading ones; or the position of the only one, -1 for the last.
    """

    shape: tuple[int, ...] = ()
    axis: int = 0

    @classmethod
    def of_kernel(cls, size: int, axis: int, ndim: int, least: int) -> "Stack":
        """Returns the stack of a kernel whose axis `axis` is one of layers.

        Args:
          size: of that axis.
          ndim: of the kernel, that axis counted.
          least: the fewest axes that a parameter of one layer has.
        """
        if axis <= least:
            return cls((size,), axis)
        if axis == ndim - 1:
            return cls((size,), -1)
        raise NotImplementedError(
            f"its layers are stacked along axis {axis} of {ndim}, and its magnitude has {least} "
            f"axes in one layer; expected an axis of up to {least}, or the last: stack layers by "
            "nnx.vmap with out_axes=0"
        )

    @property
    def count(self) -> int:
        return len(self.shape)

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yields the index of every layer, in row-major order."""
        return itertools.product(*map(range, self.shape))

    def at(self, index: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the index of one layer's part in a parameter's array."""
        if self.axis < 0:
            return (..., *index)
        return (*(slice(None),) * self.axis, *index)

    def without(self, names: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the entries of `names`, one for each axis of a parameter, that belong to the axes
        of one layer."""
        start = self._start(len(names) - self.count)
        return (*names[:start], *names[start + self.count :])

    def of_stack(self, names: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the entries of `names`, one for each axis of a parameter, that belong to the axes
        of the stack."""
        start = self._start(len(names) - self.count)
        return tuple(names[start : start + self.count])

    def joined(self, of_stack: Sequence[Any], names: Sequence[Any]) -> tuple[Any, ...]:
        """Reverses `of_stack` and `without`."""
        start = self._start(len(names))
        return (*names[:start], *of_stack, *names[start:])

    def from_leading(self, array: jax.Array) -> jax.Array:
        """Returns an array whose leading axes are the stack's with these in their place."""
        return jnp.moveaxis(array, 0, self.axis) if self.axis else array

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Joins the layers' arrays, in row-major order, into one."""
        return self.from_leading(jnp.stack(arrays).reshape(*self.shape, *arrays[0].shape))

    def map(self, function: Callable[[Any], jax.Array], arrays: Any) -> jax.Array:
        """Returns `function` of the arrays of each layer, joined: one layer after the other, since
        it may have a temporary as large as the kernel."""
        return self.from_leading(self.map_leading(lambda one, _: function(one), arrays, None))

    def map_leading(
        self, function: Callable[[Any, Any], jax.Array], arrays: Any, leading: Any
    ) -> jax.Array:
        """Does as `map`, of further arrays whose leading axes are the stack's, as the result's."""
        if self.axis:
            return lax.map(
                lambda one: function(
                    jax.tree.map(lambda array: self._taken(array, one[0]), arrays), one[1]
                ),
                (jnp.arange(self.shape[0]), leading),
            )

        return _along_leading(len(self.shape), function)(arrays, leading)

    def _taken(self, array: jax.Array, index: jax.Array) -> jax.Array:
        axis = self.axis % array.ndim
        return lax.dynamic_index_in_dim(array, index, axis, keepdims=False)

    def _start(self, ndim: int) -> int:
        return ndim if self.axis < 0 else self.axis


def _along_leading(count: int, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `function` of arrays that have `count` leading axes more."""
    if not count:
        return function
    one = _along_leading(count - 1, function)
    return lambda *arrays: lax.map(lambda parts: one(*parts), arrays)


def stacked_axes(shape: Sequence[int], single: Sequence[int]) -> list[int]:
    """Returns the axes of an array along which it may be a stack of arrays of shape `single`."""
    return [
        axis for axis in range(len(shape)) if (*shape[:axis], *shape[axis + 1 :]) == tuple(single)
    ]


def room(count: int, one: jax.Array) -> jax.Array:
    """Returns zeros for `count` arrays like `one`, along a new leading axis, where it lies."""
    shape = (count, *one.shape)
    if isinstance(one, Tracer):
        return jnp.zeros(shape, one.dtype)
    sharding = one.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return jnp.zeros(shape, one.dtype, device=sharding)
    return jnp.zeros_like(one, shape=shape)


def fill(room: jax.Array, one: jax.Array, number: int) -> jax.Array:
    """Returns `room` with `one` at `number`, in place where both are arrays."""
    if isinstance(one, Tracer):
        return room.at[number].set(one)
    named = isinstance(room.sharding, NamedSharding)
    return _put(room.sharding if named else None)(room, one, number)


@functools.cache
def _put(sharding: NamedSharding | None) -> Callable[..., jax.Array]:
    def put(room: jax.Array, one: jax.Array, number: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(room, one, number, 0)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)
