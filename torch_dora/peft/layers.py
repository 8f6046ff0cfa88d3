"""Lists the layers and parameters of a torch model that PEFT's files refer to."""

import logging
from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.peft.layers import Architecture, Layer, convolution_refusals
from dora_common.rules import listing
from torch_dora.adapt.apply import WRAPPERS, check_model, modules_with_names, refuse_peft
from torch_dora.layers import (
    DoRAConv,
    DoRAConv1D,
    DoRAEmbedding,
    DoRAExperts,
    DoRALayer,
    DoRALinear,
    PackedExperts,
    dora_layers,
    named_modules,
    packed_experts,
    placement,
)
from torch_dora.layers.conv import CONVOLUTIONS
from torch_dora.layers.experts import SUFFIX
from torch_dora.layers.linear import is_conv1d
from torch_dora.ops.quantised import as_matrix

_LOG = logging.getLogger(__name__)
_NEVER_CALLED = "is the out_proj of a MultiheadAttention, which reads its weight and never calls it"


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Returns every layer that is adapted or can be, by its module's name."""
    check_model(model, inside=WRAPPERS)
    refuse_peft(model)
    placement.refuse_ungathered(dora_layers(model))
    layers = (one for name, module in named_modules(model) for one in _layers(name, module))
    return {layer.name: layer for layer in layers}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns every parameter and buffer of the base model by name; a shared one under each of its
    names."""
    adapters, packed = set[str](), {}
    for name, module in named_modules(model, remove_duplicate=False):
        is_packed = isinstance(module, DoRAExperts)
        path = f"{name}{SUFFIX}" if is_packed else name
        if isinstance(module, DoRALayer):
            adapters |= {f"{path}.{attribute}" for attribute in ADAPTER_NAMES}
        if is_packed:
            packed[f"{path}.weight"] = name
    tensors = model.state_dict(keep_vars=True)
    return {
        packed.get(name, name): tensor for name, tensor in tensors.items() if name not in adapters
    }


def weight_name(layer: Layer) -> str:
    """Returns the name of a layer's weight in the base model."""
    return layer.name if layer.kind == "experts" else f"{layer.name}.weight"


def to_peft(layer: DoRALayer, name: str, tensor: Tensor) -> Tensor:
    """Returns lora_a, lora_b or magnitude in the order of PEFT's file: lora_b of packed experts is
    [out, r, experts] there."""
    is_permuted = isinstance(layer, DoRAExperts) and name == "lora_b"
    return tensor.permute(1, 2, 0) if is_permuted else tensor


def from_peft(layer: DoRALayer, name: str, tensor: Tensor) -> Tensor:
    """Returns a tensor of PEFT's file in the shape of the layer's lora_a, lora_b or magnitude."""
    shape = getattr(layer, name).shape
    if isinstance(layer, DoRAExperts) and name == "lora_b":
        experts, features, rank = shape
        return tensor.reshape(features, rank, experts).permute(2, 0, 1).contiguous()
    return tensor.reshape(shape)


def architecture(layers: Mapping[str, Layer], parameters: Mapping[str, Tensor]) -> Architecture:
    """Returns what a folder is matched against, from the results of `layers_of` and
    `parameters_of`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    ids = {name: id(tensor) for name, tensor in parameters.items()}
    return Architecture(list(layers.values()), shapes, ids)


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


def _layers(name: str, module: Any) -> Iterator[Layer]:
    """Yields the layer of ``module``, or those of its packed experts in the order in which they
    were registered."""
    packed = packed_experts(module)
    for parameter in module._parameters:
        layer = module._modules.get(parameter + SUFFIX, packed.get(parameter))
        if isinstance(layer, DoRAExperts | PackedExperts):
            experts, *features = layer.weight.shape
            out, width = reversed(features) if layer.is_transposed else features
            path = f"{name}.{parameter}".lstrip(".")
            # PEFT takes this attribute for False where a module has none.
            is_swapped = layer.is_transposed and not getattr(module, "is_transposed", False)
            yield Layer(path, "experts", width, out, experts=experts, is_swapped_in_lora=is_swapped)
    if (layer := _layer(name, module)) is not None:
        yield layer


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
