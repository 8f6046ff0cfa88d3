"""Finds the PyTorch counterparts of Flax layers and of weights that a module's own code reads."""

from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from dora_common.peft.layers import Layer, convolution_refusals
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers import DoRALayer
from jax_dora.layers.classes import kind_of
from jax_dora.peft.names import Names


def torch_layer(
    weight: AdaptableWeight, names: Names, name_of: Callable[[str], str]
) -> Layer | None:
    """Returns the PyTorch layer for a weight, or for one layer's part of a stacked one; None if
    there is none that PEFT can adapt. `name_of` translates a path to the name of the PyTorch
    module."""
    if weight.is_layer:
        return _layer(name_of(weight.path), weight.module, kind_of(weight.module))
    kernel = weight.contraction(1).kernel
    experts, features, width = kernel.matrices
    if not kernel.batch:
        return Layer(name_of(weight.path), "linear", features, width)
    param = names.parameter(weight.param)
    return Layer(
        f"{name_of(weight.module_paths[0])}.{param}".lstrip("."),
        "experts",
        features,
        width,
        experts=experts,
        is_in_order=param in names.experts,
    )


def _layer(name: str, module: Any, kind: type[DoRALayer]) -> Layer | None:
    if kind.base_type is nnx.Embed:
        features, width = kind.unstacked_shape(module)
        return Layer(name, "embedding", features, width)
    if kind.base_type is nnx.Conv:
        *window, _, width = module.kernel_shape
        refusals = convolution_refusals(
            module.feature_group_count,
            window,
            _each(module.kernel_dilation, len(window)),
            _padding_mode(module.padding, window),
        )
        if any(step != 1 for step in _each(module.input_dilation, len(window))):
            refusals = (*refusals, "has input dilation")
        return Layer(name, "conv", module.in_features, width, tuple(window), refusals)
    # PEFT does not support transposed convolutions.
    if kind.base_type is nnx.ConvTranspose or not _is_linear(module, kind):
        return None
    _, features, width = kind.contraction_of(module).kernel.matrices
    return Layer(name, "linear", features, width)


def _each(steps: int | Sequence[int] | None, axes: int) -> Sequence[int]:
    return (steps or 1,) * axes if steps is None or isinstance(steps, int) else steps


def _padding_mode(padding: Any, window: Sequence[int]) -> str:
    """Returns PyTorch's padding_mode: "zeros" also for "CAUSAL" padding and padding that differs
    between both sides, since PyTorch models then pad the input with zeros themselves."""
    if padding in ("CIRCULAR", "REFLECT") and any(size > 1 for size in window):
        return padding.lower()
    return "zeros"


def _is_linear(module: Any, kind: type[DoRALayer]) -> bool:
    """Returns whether a projection corresponds to a PyTorch Linear: its kernel has no batch axes,
    and the output has its axes in the kernel's order."""
    if kind.base_type is nnx.Einsum and not module.einsum_str:
        return False
    contraction = kind.contraction_of(module)
    out, axes = contraction.labels("o"), len(kind.unstacked_shape(module))
    has_matrix = set(contraction.roles) == {"i", "o"} and len(set(contraction.weight)) == axes
    return has_matrix and out == tuple(label for label in contraction.y if label in out)
