"""Layers that `nnx.vmap` has stacked: one module whose parameters have additional axes."""

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
    """The axes that stacking adds to each parameter of a layer.

    Attributes:
      shape: the sizes of the stack axes; () for a single layer.
      axis: 0 if the stack axes are the leading ones; else the position of the only stack axis, -1
        for the last.
    """

    shape: tuple[int, ...] = ()
    axis: int = 0

    @classmethod
    def of_kernel(cls, size: int, axis: int, ndim: int, magnitude_ndim: int) -> "Stack":
        """Returns the stack of a kernel that is stacked along `axis`.

        Args:
          size: the size of that axis.
          ndim: the number of kernel axes, that axis included.
          magnitude_ndim: the number of axes of a single layer's magnitude, the parameter with the
            fewest axes.

        Raises:
          NotImplementedError: a parameter would lack that axis, and it is not the last one.
        """
        if axis <= magnitude_ndim:
            return cls((size,), axis)
        if axis == ndim - 1:
            return cls((size,), -1)
        raise NotImplementedError(
            f"its layers are stacked along axis {axis} of {ndim}, and a single layer's magnitude "
            f"has {magnitude_ndim} axes; expected an axis of at most {magnitude_ndim}, or the "
            "last: stack the layers by nnx.vmap with out_axes=0"
        )

    @property
    def count(self) -> int:
        return len(self.shape)

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yields the index of every layer, in row-major order."""
        return itertools.product(*map(range, self.shape))

    def at(self, index: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the index that selects one layer in a parameter's array."""
        if self.axis < 0:
            return (..., *index)
        return (*(slice(None),) * self.axis, *index)

    def layer_part(self, names: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the entries of `names`, one for each axis of a parameter, that belong to a single
        layer's axes."""
        start = self._start(len(names) - self.count)
        return (*names[:start], *names[start + self.count :])

    def stack_part(self, names: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the entries of `names`, one for each axis of a parameter, that belong to the
        stack axes."""
        start = self._start(len(names) - self.count)
        return tuple(names[start : start + self.count])

    def combine(self, stack_names: Sequence[Any], names: Sequence[Any]) -> tuple[Any, ...]:
        """Reverses `stack_part` and `layer_part`."""
        start = self._start(len(names))
        return (*names[:start], *stack_names, *names[start:])

    def move_stack_axes(self, array: jax.Array) -> jax.Array:
        """Moves the stack axes from the front of an array to their position."""
        return jnp.moveaxis(array, 0, self.axis) if self.axis else array

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Stacks the layers' arrays, given in row-major order, into one array."""
        return self.move_stack_axes(jnp.stack(arrays).reshape(*self.shape, *arrays[0].shape))

    def map(self, function: Callable[[Any], jax.Array], arrays: Any) -> jax.Array:
        """Returns `function` of each layer's arrays, stacked. It runs layer by layer, because its
        temporaries may be as large as the kernel."""
        return self.move_stack_axes(
            self.map_leading(lambda layer, _: function(layer), arrays, None)
        )

    def map_leading(
        self, function: Callable[[Any, Any], jax.Array], arrays: Any, leading: Any
    ) -> jax.Array:
        """Like `map`, with a second argument. The stack axes of `leading` and of the result are the
        leading ones."""
        if not self.axis:
            return _along_leading(len(self.shape), function)(arrays, leading)

        def apply(layer: tuple[jax.Array, Any]) -> jax.Array:
            index, part = layer
            return function(
                jax.tree.map(lambda array: self._take_layer(array, index), arrays), part
            )

        return lax.map(apply, (jnp.arange(self.shape[0]), leading))

    def _take_layer(self, array: jax.Array, index: jax.Array) -> jax.Array:
        axis = self.axis % array.ndim
        return lax.dynamic_index_in_dim(array, index, axis, keepdims=False)

    def _start(self, ndim: int) -> int:
        return ndim if self.axis < 0 else self.axis


def _along_leading(count: int, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function that applies `function` along `count` additional leading axes."""
    if not count:
        return function
    inner = _along_leading(count - 1, function)
    return lambda *arrays: lax.map(lambda parts: inner(*parts), arrays)


def stacked_axes(shape: Sequence[int], single: Sequence[int]) -> list[int]:
    """Returns each axis without which `shape` equals `single`: the axes along which arrays of shape
    `single` may be stacked."""
    return [
        axis for axis in range(len(shape)) if (*shape[:axis], *shape[axis + 1 :]) == tuple(single)
    ]


def allocate_stack(count: int, layer: jax.Array) -> jax.Array:
    """Returns zeros for `count` arrays like `layer` along a new leading axis, with the sharding of
    `layer`."""
    shape = (count, *layer.shape)
    if isinstance(layer, Tracer):
        return jnp.zeros(shape, layer.dtype)
    sharding = layer.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return jnp.zeros(shape, layer.dtype, device=sharding)
    return jnp.zeros_like(layer, shape=shape)


def set_layer(stack: jax.Array, layer: jax.Array, number: int) -> jax.Array:
    """Returns `stack` with `layer` at index `number`. Concrete arrays are updated in place."""
    if isinstance(layer, Tracer):
        return stack.at[number].set(layer)
    named = isinstance(stack.sharding, NamedSharding)
    return _compiled_update(stack.sharding if named else None)(stack, layer, number)


@functools.cache
def _compiled_update(sharding: NamedSharding | None) -> Callable[..., jax.Array]:
    def write_layer(stack: jax.Array, layer: jax.Array, number: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(stack, layer, number, 0)

    return jax.jit(write_layer, donate_argnums=0, out_shardings=sharding)
