"""The layers that are called in a pass through a linen model, and how transforms stack them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct, traverse_util

from jax_dora.adapt.merge import Setting


@dataclasses.dataclass
class CallLog:
    """The layers that were called in a pass through a model.

    Attributes:
      linear: whether it is a linear projection, by the path of every module with parameters.
      adapted: by path, of each adapted layer the name of the kernel, the setting, and the axis
        along which each transform around it has stacked the kernel, the outermost first.
      computed: the paths of adapted layers whose parameters `nn.map_variables` makes of others.
      is_following: whether the pass follows adapted weights, by an `nn.map_variables` of its own.
      token: differs where a pass has to be traced anew.
    """

    token: int = 0
    linear: dict[str, bool] = dataclasses.field(default_factory=dict)
    adapted: dict[str, tuple[str, Setting, tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
    computed: set[str] = dataclasses.field(default_factory=set)
    traces_weights: bool = False


def holds_parameters(module: nn.Module) -> bool:
    params = module.variables.get("params", {})
    return any(not isinstance(leaf, Mapping) for leaf in params.values())


def has_computed_params(module: Any, own: int) -> bool:
    """Returns whether `nn.map_variables` makes a module's parameters of others.

    Args:
      own: how many names of the scope's path, which names transforms too, are not the model's.
    """
    return any("map_variables(" in one for one in module.scope.debug_path[own:])


class AxisRecorder(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter in a box that notes which axes Flax's transforms take off it."""

    value: Any
    axes: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "AxisRecorder":
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "AxisRecorder":
        return self.replace(axes=self.axes[:-1])

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "AxisRecorder":
        return self.replace(axes=(*self.axes, index))


def record_axes(params: Mapping[str, Any]) -> Any:
    """Returns `params` with every magnitude in a box that notes its axes."""
    return traverse_util.path_aware_map(
        lambda path, leaf: AxisRecorder(nn.unbox(leaf)) if path[-1] == "magnitude" else leaf, params
    )


def stack_axes(module: nn.Module) -> tuple[int, ...]:
    """Returns the axes along which the transforms around a module have stacked its magnitude, the
    outermost first; () unless its parameters came from `noting_axes`."""
    box = module.variables["params"].get("magnitude")
    return box.axes if isinstance(box, AxisRecorder) else ()


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
