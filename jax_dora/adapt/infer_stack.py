"""Infers how `nnx.vmap` has stacked layers for `nnx.scan`, from the additional axes of their
parameters."""

import logging
from typing import Any

from jax_dora.layers import DoRALayer, dora_class_of
from jax_dora.layers.stack import Stack, stacked_axes
from jax_dora.tracing.registry import scan_axis
from jax_dora.tracing.weight_adapter import WeightAdapter

_LOG = logging.getLogger("jax_dora")


def infer_stack(layer: Any, axis: int | None = None) -> Stack:
    """Returns how the parameters of a base layer, a DoRA layer or an adapted weight are stacked.

    Args:
      axis: the stack axis to assume, with a warning, if the shapes allow several axes and the
        kernel has no `param_scan_axis`, MaxText's metadata. None raises an error instead.

    Raises:
      NotImplementedError: the kernel's shape is not a stack of such layers.
      ValueError: the layers may be stacked along one axis or another.
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
        # The bias is stacked along the same axis, or along its last one.
        fitting = [a for a in axes if bias.shape[min(a, bias.ndim - 1)] == shape[a]]
        axes = fitting or axes
    if (known_axis := scan_axis(kernel)) in axes:
        axes = [known_axis]
    axis = axis if axis is None else axis % len(shape)
    if axis in axes and len(axes) > 1:
        _LOG.warning(
            "A stack of %s has a %s of shape %s, and a single layer's has shape %s, so the layers "
            "may be stacked along axis %s. Axis %d is assumed, the default of nnx.vmap",
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
            f"its {cls.kernel_name} has shape {shape}, and a single layer's has shape {single}, so "
            f"it may be stacked along axis {' or '.join(map(str, axes))}; expected a shape with "
            "only one possible axis: pass inputs for the model as example= of apply_dora, or set "
            f"param_scan_axis in the metadata of the {cls.kernel_name}"
        )
    magnitude_ndim = len(cls.layout_of(layer, 1).magnitude.stored)
    return Stack.of_kernel(shape[axes[0]], axes[0], len(shape), magnitude_ndim)


def _no_stack(cls: Any, shape: tuple[int, ...], single: tuple[int, ...]) -> NotImplementedError:
    return NotImplementedError(
        f"its {cls.kernel_name} has shape {shape}; expected {single}, with one additional axis or "
        "several leading ones if nnx.vmap has stacked such layers"
    )
