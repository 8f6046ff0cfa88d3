"""Lists the layers and parameters of a torch model that PEFT's files refer to."""

import logging
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.peft.layers import Layer, Outline, convolution_refusals
from dora_common.rules import listing
from torch_dora.adapt.apply import WRAPPERS, check_model, modules_with_names, refuse_peft
from torch_dora.layers import (
    DoRAConv,
    DoRAConv1D,
    DoRAEmbedding,
    DoRALayer,
    DoRALinear,
    named_modules,
)
from torch_dora.layers.conv import CONVOLUTIONS
from torch_dora.layers.linear import is_conv1d
from torch_dora.ops.quantised import as_matrix

_LOG = logging.getLogger(__name__)
_NEVER_CALLED = "is the out_proj of a MultiheadAttention, which reads its weight and never calls it"


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Returns every layer that is adapted or can be, by its module's name."""
    check_model(model, inside=WRAPPERS)
    refuse_peft(model)
    layers = ((name, _layer(name, module)) for name, module in named_modules(model))
    return {name: layer for name, layer in layers if layer is not None}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns every parameter and buffer of the base model by name; a shared one under each of its
    names."""
    adapters = {
        f"{name}.{attribute}"
        for name, module in named_modules(model, remove_duplicate=False)
        if isinstance(module, DoRALayer)
        for attribute in ADAPTER_NAMES
    }
    tensors = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if name not in adapters}


def outline(layers: Mapping[str, Layer], parameters: Mapping[str, Tensor]) -> Outline:
    """Returns the outline that a folder is matched against, from the results of `layers_of` and
    `parameters_of`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    ids = {name: id(tensor) for name, tensor in parameters.items()}
    return Outline(list(layers.values()), shapes, ids)


def warn_of_shared(model: nn.Module, adapted: Set[str]) -> None:
    """Warns about the layers in ``adapted`` that are shared: PEFT would adapt them under one name
    only."""
    shared = [
        ", ".join(names)
        for _, names in modules_with_names(model)
        if len(names) > 1 and not adapted.isdisjoint(names)
    ]
    if shared:
        _LOG.warning(
            "each of these layers is one module with several names, and adapted wherever it is "
            "called; PEFT adapts it under its first name only:%s",
            listing(shared),
        )


def _layer(name: str, module: Any) -> Layer | None:
    if is_conv1d(module) or isinstance(module, DoRAConv1D):
        features, width = module.weight.shape
        return Layer(name, "linear", features, width)
    if isinstance(module, DoRALinear):
        return Layer(name, "linear", module.lora_a.shape[1], module.lora_b.shape[0])
    if isinstance(module, nn.Linear):
        width, features = as_matrix(module.weight).shape
        never_called = isinstance(module, NonDynamicallyQuantizableLinear)
        refusals = (_NEVER_CALLED,) if never_called else ()
        return Layer(name, "linear", features, width, refusals=refusals)
    if isinstance(module, nn.Embedding | DoRAEmbedding):
        vocabulary, width = module.weight.shape
        return Layer(name, "embedding", vocabulary, width)
    if isinstance(module, (*CONVOLUTIONS, DoRAConv)):
        base = module.settings if isinstance(module, DoRAConv) else module
        width, _, *window = module.weight.shape
        mode = base.padding_mode if _has_padding(base) else "zeros"
        refusals = convolution_refusals(base.groups, window, base.dilation, mode)
        return Layer(name, "conv", base.in_channels, width, tuple(window), refusals)
    return None


def _has_padding(convolution: Any) -> bool:
    """Returns whether the convolution pads its input."""
    padding = convolution.padding
    if padding == "same":
        return any(size > 1 for size in convolution.kernel_size)
    return padding != "valid" and any(padding)
