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

# The letters of stack axes in the axes of a weight, as in `jax_dora.register`: "s" for the
# outermost stack, "t" for the stack inside of it, and so on.
STACK_LETTERS = "stuvwxyz"


@dataclasses.dataclass(frozen=True)
class Stack:
    """The axes that stacking adds to each parameter of a layer. Stacks may contain stacks.

    `shape` has the sizes of the stack axes, outermost first; () for a single layer. `axes` has, for
    each, the axis along which a transform splits a parameter to get those of the next inner stack
    or layer; -1 for the last, and by default 0. A parameter [in, out] in stacks that are each made
    along axis 1 is [in, outer, inner, out], with axes (1, 1).
    """

    shape: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", innermost(self.axes, len(self.shape)))

    @classmethod
    def of(cls, shape: Sequence[int], axes: tuple[int, ...]) -> "Stack":
        """Returns the stack with these axes of a parameter with this shape."""
        stack = cls((0,) * len(axes), axes)
        return cls(stack.stack_part(shape), axes)

    @classmethod
    def of_kernel(cls, shape: Sequence[int], axes: Sequence[int], magnitude_ndim: int) -> "Stack":
        """Returns the stack along `axes` of a kernel with this shape. Raises NotImplementedError if
        a parameter would lack one of the axes, and it is not the last: a single layer's magnitude
        has the fewest, `magnitude_ndim`."""
        found: list[int] = []
        for inside, axis in enumerate(reversed(axes)):
            ndim = len(shape) - len(axes) + inside + 1
            limit = magnitude_ndim + sum(other >= 0 for other in found)
            if axis > limit and axis != ndim - 1:
                raise NotImplementedError(
                    f"its layers are stacked along axis {axis} of {ndim}, and a single layer's "
                    f"magnitude has {limit} axes; expected an axis of at most {limit}, or the "
                    "last: stack the layers by nnx.vmap with out_axes=0"
                )
            found.append(axis if axis <= limit else -1)
        return cls.of(shape, tuple(reversed(found)))

    @property
    def count(self) -> int:
        return len(self.shape)

    @property
    def is_leading(self) -> bool:
        """Whether the stack axes are the leading ones."""
        return not any(self.axes)

    def order(self, ndim: int) -> list[int]:
        """Returns what each axis of a parameter is, given the number of axes of a single layer's
        parameter: an axis of that, or `~number` for a stack axis."""
        order = list(range(ndim))
        for number in reversed(range(self.count)):
            axis = self.axes[number]
            order.insert(axis if axis >= 0 else len(order), ~number)
        return order

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yields the index of every layer, in row-major order."""
        return itertools.product(*map(range, self.shape))

    def at(self, index: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the index that selects one layer in a parameter's array."""
        order = self.order(max(0, 0, *self.axes))
        parts = [index[~axis] if axis < 0 else slice(None) for axis in order]
        count = len(parts) - sum(axis < 0 for axis in self.axes)
        return (*parts[:count], *([...] if parts[count:] else []), *parts[count:])

    def layer_part(self, names: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the entries of `names`, one for each axis of a parameter, of a single layer's."""
        order = self.order(len(names) - self.count)
        return tuple(name for name, axis in zip(names, order, strict=True) if axis >= 0)

    def stack_part(self, names: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the entries of `names`, one for each axis, of the stack axes, outermost first."""
        order = self.order(len(names) - self.count)
        return tuple(names[order.index(~number)] for number in range(self.count))

    def combine(self, stack_names: Sequence[Any], names: Sequence[Any]) -> tuple[Any, ...]:
        """Reverses `stack_part` and `layer_part`."""
        order = self.order(len(names))
        return tuple(stack_names[~axis] if axis < 0 else names[axis] for axis in order)

    def move_stack_axes(self, array: jax.Array) -> jax.Array:
        """Moves the stack axes from the front of an array to their positions."""
        if self.is_leading:
            return array
        axes = range(array.ndim)
        return array.transpose(self.combine(axes[: self.count], axes[self.count :]))

    def move_to_front(self, array: jax.Array) -> jax.Array:
        """Reverses `move_stack_axes`."""
        if self.is_leading:
            return array
        axes = range(array.ndim)
        return array.transpose((*self.stack_part(axes), *self.layer_part(axes)))

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Stacks the layers' arrays, given in row-major order, into one array."""
        return self.move_stack_axes(jnp.stack(arrays).reshape(*self.shape, *arrays[0].shape))

    def map(self, function: Callable[..., jax.Array], arrays: Any, *settings: Any) -> jax.Array:
        """Returns `function(arrays, *settings)` of each layer's arrays, stacked. It runs layer by
        layer, because its temporaries may be as large as the kernel. Outside of compiled programs
        it is compiled once for a function, its hashable settings, and shapes."""
        if not self.count:
            return function(arrays, *settings)
        return _map(self, function, settings, arrays)

    def map_leading(
        self, function: Callable[[Any, Any], jax.Array], arrays: Any, leading: Any
    ) -> jax.Array:
        """Like `map`, with a second argument, whose and the result's stack axes are leading."""
        if self.is_leading:
            return _along_leading(self.count, function)(arrays, leading)

        def apply(index: jax.Array, part: Any) -> jax.Array:
            return function(
                jax.tree.map(lambda array: self._take_layer(array, index), arrays), part
            )

        indices = jnp.stack(jnp.indices(self.shape), -1)
        return _along_leading(self.count, apply)(indices, leading)

    def _take_layer(self, array: jax.Array, index: jax.Array) -> jax.Array:
        for number, axis in enumerate(self.axes):
            array = lax.dynamic_index_in_dim(
                array, index[number], axis % array.ndim, keepdims=False
            )
        return array


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _map(
    stack: Stack, function: Callable[..., jax.Array], settings: tuple[Any, ...], arrays: Any
) -> jax.Array:
    mapped = stack.map_leading(lambda layer, _: function(layer, *settings), arrays, None)
    return stack.move_stack_axes(mapped)


def innermost(axes: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns the `Stack.axes` of the `count` innermost stacks. Stacks around the known ones are
    along leading axes."""
    return (*(0,) * (count - len(axes)), *axes[max(0, len(axes) - count) :])


def _along_leading(count: int, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function that applies `function` along `count` additional leading axes."""
    if not count:
        return function
    inner = _along_leading(count - 1, function)
    return lambda *arrays: lax.map(lambda parts: inner(*parts), arrays)


def stacked_axes(shape: Sequence[int], single: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns all `Stack.axes` for which arrays of shape `single` may have been stacked to `shape`,
    if outer stack axes come before inner ones."""
    every, count = range(len(shape)), len(shape) - len(single)
    return [
        tuple(axis - number for number, axis in enumerate(chosen))
        for chosen in itertools.combinations(every, max(count, 0))
        if tuple(shape[axis] for axis in every if axis not in chosen) == tuple(single)
    ]


def with_stack_axes(axes: str, stack_axes: Sequence[int]) -> str:
    """Returns a weight's `axes` with additional letters for outer stacks along `stack_axes`."""
    count = len(stack_axes)
    axes = axes.translate(str.maketrans(STACK_LETTERS[: -count or None], STACK_LETTERS[count:]))
    for number in reversed(range(count)):
        axis = stack_axes[number]
        axes = f"{axes[:axis]}{STACK_LETTERS[number]}{axes[axis:]}"
    return axes


def stack_axes_of(axes: str) -> tuple[int, ...]:
    """Returns the `Stack.axes` of a weight with these axes."""
    found = []
    for letter in sorted({*axes} & {*STACK_LETTERS}):
        found.append(axes.index(letter))
        axes = axes.replace(letter, "")
    return tuple(found)


def without_stack_axes(axes: str, letter: str = "") -> str:
    """Returns a weight's axes without its stack axes, or with `letter` in place of each."""
    return "".join(letter if axis in STACK_LETTERS else axis for axis in axes)


def allocate_stack(count: int, layer: jax.Array) -> jax.Array:
    """Returns zeros for `count` arrays like `layer` along a new leading axis, sharded like it."""
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
