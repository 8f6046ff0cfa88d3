"""What PyTorch has in the place of each Flax layer."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from dora_common.peft.layers import Layer, convolution_refusals
from jax_dora.layers import DoRALayer
from jax_dora.layers.layout import Axes, convolution_layout


def torch_layer(
    name: str, module: Any, kind: type[DoRALayer] | None
) -> tuple[Layer | None, Axes | None]:
    """Returns what PyTorch would have, and how the weight is a matrix; no layer where it has no
    such."""
    if kind is None:
        return None, None
    if kind.base_type is nnx.Embed:
        features, width = kind.unstacked_shape(module)
        return Layer(name, "embedding", features, width), kind.layout_of(module, 1).kernel
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
        layer = Layer(name, "conv", module.in_features, width, tuple(window), refusals)
        # Groups lie alike in both, so that the window is all there is to move.
        return layer, convolution_layout(tuple(module.kernel_shape), 1, 1).kernel
    if kind.base_type is nnx.ConvTranspose:
        return None, None  # PEFT has no LoRA of it
    return _projection(name, module, kind)


def _each(steps: int | Sequence[int] | None, axes: int) -> Sequence[int]:
    return (steps or 1,) * axes if steps is None or isinstance(steps, int) else steps


def _padding_mode(padding: Any, window: Sequence[int]) -> str:
    """PyTorch's padding_mode. It has none for "CAUSAL", whose zeros a PyTorch model puts before the
    input itself, as for what is padded differently on both sides."""
    if padding in ("CIRCULAR", "REFLECT") and any(size > 1 for size in window):
        return padding.lower()
    return "zeros"


def _projection(name: str, module: Any, kind: type[DoRALayer]) -> tuple[Layer | None, Axes | None]:
    """Linear, and LinearGeneral and Einsum as the Linear that they are without batch axes."""
    if kind.base_type is nnx.Einsum and not module.einsum_str:
        return None, None
    if kind.base_type is not nnx.Linear:
        equation = kind.equation(module)  # pyright: ignore[reportAttributeAccessIssue]
        out = equation.kernel_letters("o")
        axes = len(kind.unstacked_shape(module))
        is_linear = set(equation.order) == {"i", "o"} and len(set(equation.kernel)) == axes
        if not is_linear or out != "".join(letter for letter in equation.y if letter in out):
            return None, None
    kernel = kind.layout_of(module, 1).kernel
    _, features, width = kernel.matrices
    return Layer(name, "linear", features, width), kernel
