"""The axes along which linen's transforms stack the parameters of a layer."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util


class Noting(nn.meta.AxisMetadata):
    """A parameter in a box that notes which axes Flax's transforms take off it."""

    def __init__(self, value: Any, axes: tuple[int, ...] = ()) -> None:
        self.value, self.axes = value, axes

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "Noting":
        return Noting(val, self.axes)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Noting":
        return Noting(self.value, self.axes[:-1])

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Noting":
        return Noting(self.value, (*self.axes, index))


jax.tree_util.register_pytree_node(
    Noting, lambda box: ((box.value,), box.axes), lambda axes, values: Noting(values[0], axes)
)


def noting_axes(params: Mapping[str, Any]) -> Any:
    """Returns `params` with every magnitude in a box that notes its axes."""
    return traverse_util.path_aware_map(
        lambda path, leaf: Noting(nn.unbox(leaf)) if path[-1] == "magnitude" else leaf, params
    )


def stack_axes(module: nn.Module) -> tuple[int, ...]:
    """Returns the axes along which the transforms around a module have stacked its magnitude, the
    outermost first; () unless its parameters came from `noting_axes`."""
    box = module.variables["params"].get("magnitude")
    return box.axes if isinstance(box, Noting) else ()


def stack_first(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns `array` with the axes of its stack in front, in their order."""
    for number, axis in enumerate(axes):
        array = jnp.moveaxis(array, axis + number if axis >= 0 else axis, number)
    return array


def stack_back(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Reverses `stack_first`."""
    for number, axis in reversed(list(enumerate(axes))):
        array = jnp.moveaxis(array, number, axis + number if axis >= 0 else axis)
    return array
