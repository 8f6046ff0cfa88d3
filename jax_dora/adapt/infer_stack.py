"""Infers how `nnx.vmap` has stacked layers for `nnx.scan`, from the additional axes of their
parameters."""

import logging
from typing import Any

from jax_dora.layers import DoRALayer, dora_class_of
from jax_dora.layers.stack import Stack, innermost, stacked_axes
from jax_dora.tracing.registry import scan_axis

_LOG = logging.getLogger("jax_dora")


def infer_stack(layer: Any, axes: tuple[int, ...] | None = None) -> Stack:
    """Returns how the parameters of a base layer or a DoRA layer are stacked.

    `axes` is the known `Stack.axes`; with () leading axes are assumed, with a warning, if the
    shapes allow several and the kernel has no `param_scan_axis`, MaxText's metadata; None raises
    ValueError then. Raises NotImplementedError if the kernel's shape is not a stack of such layers.
    """
    if isinstance(layer, DoRALayer):
        return layer.stack
    cls = dora_class_of(layer)
    assert cls is not None
    kernel = getattr(layer, cls.kernel_name)
    shape, single = tuple(kernel.shape), tuple(cls.unstacked_shape(layer))
    found = stacked_axes(shape, single)
    if not found:
        raise NotImplementedError(
            f"its {cls.kernel_name} has shape {shape}; expected {single}, with an additional axis "
            "for each stack of such layers that nnx.vmap has made"
        )
    count = len(found[0])
    if (bias := getattr(layer, "bias", None)) is not None:
        # The bias is stacked along the same axes, or along its last one.
        found = [one for one in found if _fits(shape, one, bias.shape)] or found
    # MaxText stacks along the same axis at every level, and its metadata name the outermost.
    by_metadata = (scan_axis(kernel) or 0,) * count
    if axes and (known := _among(found, innermost(axes, count), len(shape))):
        found = [known]
    elif scan_axis(kernel) is not None and by_metadata in found:
        found = [by_metadata]
    elif axes is not None and len(found) > 1 and (0,) * count in found:
        leading = (0,) * count
        _LOG.warning(
            "A stack of %s has a %s of shape %s, and a single layer's has shape %s, so the layers "
            "may be stacked along axis %s. Axis %s is assumed, the default of nnx.vmap",
            cls.__name__,
            cls.kernel_name,
            shape,
            single,
            " or ".join(_described(one, len(shape)) for one in found),
            _described(leading, len(shape)),
        )
        found = [leading]
    if len(found) > 1:
        listed = " or ".join(_described(one, len(shape)) for one in found)
        raise ValueError(
            f"its {cls.kernel_name} has shape {shape}, and a single layer's has shape {single}, so "
            f"it may be stacked along axis {listed}; expected a shape with only one possible axis: "
            "pass inputs for the model as example= of apply_dora, or set param_scan_axis in the "
            f"metadata of the {cls.kernel_name}"
        )
    return Stack.of_kernel(shape, found[0], len(cls.contraction_of(layer).magnitude.stored))


def _fits(shape: tuple[int, ...], axes: tuple[int, ...], bias_shape: tuple[int, ...]) -> bool:
    """Returns whether a kernel and a bias may be stacked along the same axes."""
    try:
        stack = Stack.of_kernel(shape, axes, len(bias_shape) - len(axes))
    except NotImplementedError:
        return False
    return stack.stack_part(bias_shape) == stack.shape


def _among(
    found: list[tuple[int, ...]], axes: tuple[int, ...], ndim: int
) -> tuple[int, ...] | None:
    """Returns `axes`, without negative ones, if a kernel of `ndim` axes may be stacked along them;
    else None. In `found`, outer stack axes come before inner ones."""
    positions = [sorted(_positions(one, ndim)) for one in found]
    if sorted(_positions(axes, ndim)) not in positions:
        return None
    return tuple(axis % (ndim - number) for number, axis in enumerate(axes))


def _positions(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Returns the stack axes of a kernel of `ndim` axes, outermost first."""
    return Stack((0,) * len(axes), axes).stack_part(range(ndim))


def _described(axes: tuple[int, ...], ndim: int) -> str:
    return " and ".join(map(str, _positions(axes, ndim)))
