"""Finds the stacks of layers that `nnx.vmap` makes for `nnx.scan`: modules whose parameters have
further axes."""

import logging
from typing import Any

from jax_dora.layers import DoRALayer, dora_class_of
from jax_dora.layers.stack import Stack, stacked_axes
from jax_dora.weights.registry import scan_axis
from jax_dora.weights.weight_adapter import WeightAdapter

_LOG = logging.getLogger("jax_dora")


def infer_stack(layer: Any, axis: int | None = None) -> Stack:
    """Returns how the parameters of a base or DoRA layer, or of an adapted weight, are stacked.

    Args:
      axis: that layers are taken to be stacked along, with a warning, where the shapes fit several
        and MaxText's metadata, `param_scan_axis`, says nothing; else they have to tell.

    Raises:
      NotImplementedError: the kernel is no stack of such layers.
      ValueError: it may be stacked along one axis or another.
    """
    if isinstance(layer, DoRALayer | WeightAdapter):
        return layer.stack
    cls = dora_class_of(layer)
    assert cls is not None
    kernel = getattr(layer, cls.kernel_name)
    shape, single = tuple(kernel.shape), tuple(cls.unstacked_shape(layer))
    lead = len(shape) - len(single)
    if lead != 1:
        if lead < 0 or shape[lead:] != single:
            raise _no_stack(cls, shape, single)
        return Stack(shape[:lead])
    axes = stacked_axes(shape, single)
    if (bias := getattr(layer, "bias", None)) is not None:
        alike = [one for one in axes if bias.shape[min(one, bias.ndim - 1)] == shape[one]]
        axes = alike or axes
    if (said := scan_axis(kernel)) in axes:
        axes = [said]
    axis = axis if axis is None else axis % len(shape)
    if axis in axes and len(axes) > 1:
        _LOG.warning(
            "A stack of %s whose %s has shape %s, where one layer's has %s, may be stacked along "
            "axis %s; axis %d is taken, which nnx.vmap stacks along unless out_axes says otherwise",
            cls.__name__,
            cls.kernel_name,
            shape,
            single,
            " or ".join(map(str, axes)),
            axis,
        )
        axes = [axis]
    if not axes:
        raise _no_stack(cls, shape, single)
    if len(axes) > 1:
        raise ValueError(
            f"its {cls.kernel_name} has shape {shape}, where one layer's has {single}: it may be "
            f"stacked along axis {' or '.join(map(str, axes))}; expected shapes that tell, or "
            "example=, inputs to call the model with, in apply_dora; or the axis in the metadata "
            f"of the {cls.kernel_name}, as param_scan_axis"
        )
    least = len(cls.layout_of(layer, 1).magnitude.stored)
    return Stack.of_kernel(shape[axes[0]], axes[0], len(shape), least)


def _no_stack(cls: Any, shape: tuple[int, ...], single: tuple[int, ...]) -> NotImplementedError:
    return NotImplementedError(
        f"its {cls.kernel_name} has shape {shape}; expected {single}, with an axis more where "
        "nnx.vmap has stacked such layers along it, or leading axes"
    )
