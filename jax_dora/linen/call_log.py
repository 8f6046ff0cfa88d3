"""Records the layers that a call of a linen model reaches, and how transforms stack them."""

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
    """The layers that one call of a model reached.

    Attributes:
      token: distinguishes calls; a different token makes Flax trace the model again.
      linear: whether every module with parameters, by path, is a linear projection.
      adapted: by path, the kernel's name, the setting, and the stack axes, outermost first.
      computed: the paths of adapted layers whose parameters `nn.map_variables` computes.
      traces_weights: whether the call traces adapted weights, by `nn.map_variables` itself.
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
    """Returns whether `nn.map_variables` computes a module's parameters from others. The scope's
    path has the names of transforms too, after `own` leading names that do not belong to the model.
    """
    return any("map_variables(" in name for name in module.scope.debug_path[own:])


class AxisRecorder(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A box around a parameter that records which axes Flax's transforms remove from it."""

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
    """Returns `params` with every magnitude in an `AxisRecorder`."""
    return traverse_util.path_aware_map(
        lambda path, leaf: AxisRecorder(nn.unbox(leaf)) if path[-1] == "magnitude" else leaf, params
    )


def stack_axes(module: nn.Module) -> tuple[int, ...]:
    """Returns the axes along which the transforms around a module have stacked its magnitude,
    outermost first; () if its parameters are not from `record_axes`."""
    box = module.variables["params"].get("magnitude")
    return box.axes if isinstance(box, AxisRecorder) else ()


def stack_first(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns `array` with its stack axes moved to the front, in their order."""
    for number, axis in enumerate(axes):
        array = jnp.moveaxis(array, axis + number if axis >= 0 else axis, number)
    return array


def stack_back(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Reverses `stack_first`."""
    for number, axis in reversed(list(enumerate(axes))):
        array = jnp.moveaxis(array, number, axis + number if axis >= 0 else axis)
    return array
