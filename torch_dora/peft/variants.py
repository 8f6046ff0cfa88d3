"""How the layers of an accelerated PeftModel compute.

PEFT's layers have a *variant* for each adapter that is not plain LoRA. Here are subclasses of
PEFT's DoRA variants with another ``forward``: the norm is computed from the factors, so BA is never
formed. In training PEFT applies dropout to the input of the whole correction:

    y = x Wᵀ + b + (g-1)∘(drop(x) Wᵀ) + g∘(s·drop(x) AᵀBᵀ)

If a layer has one active adapter over a torch.nn.Linear or transformers' Conv1D, then its whole
forward is one call of ``dora_linear``. In all other cases PEFT's forward calls the variants.
"""

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from peft.tuners.lora import dora, variants
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import transpose
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.module_tracker import ModuleTracker

from torch_dora.layers.base import computes_like
from torch_dora.layers.linear import is_conv1d
from torch_dora.ops import (
    check,
    compose,
    compose_delta,
    dora_linear,
    factored_norm,
    magnitude_scale,
    quantised,
)
from torch_dora.ops.linear import corrected_linear
from torch_dora.ops.operator import PLAIN

# The key in PEFT's cache of a DoRA layer. PEFT's own norms there have another dtype or shape.
_CACHED = "torch_dora-norm"
# Files between the user's line that calls a model and a warning here.
_BETWEEN = tuple(str(Path(file).parent) for file in (torch.__file__, peft.__file__, __file__))


def refuses(layer: Any, adapter: str) -> str | None:
    """Returns the reason why PEFT must compute an adapter, or None. This is asked in each call: the
    model may have been wrapped since the last one."""
    if _has_hooks_of_all():
        return "hooks of all modules must see its modules, too"
    for part in _parts(layer, adapter):
        if type(part) not in _PARTS or _is_hooked(part):
            return f"its {type(part).__name__} is wrapped by itself or has hooks"
        if getattr(part, "bias", None) is not None:
            return f"its {type(part).__name__} has a bias"
    base = layer.get_base_layer()
    if getattr(base, "groups", 1) > 1:
        return "PEFT's DoRA of a grouped convolution is not that of its weight"
    if getattr(base, "padding_mode", "zeros") != "zeros":
        return f"PEFT pads with zeros in its DoRA of a convolution with {base.padding_mode} padding"
    if isinstance(layer.scaling[adapter], Tensor):
        return "its scaling is a Tensor"
    if layer.ephemeral_gpu_offload:
        return "ephemeral_gpu_offload moves its tensors in each call"
    return None


def _parts(layer: Any, adapter: str) -> list[Any]:
    """Returns the modules of an adapter; an embedding has its other parameters itself."""
    parts = [layer.lora_magnitude_vector[adapter]]
    if adapter in layer.lora_A:
        parts += [layer.lora_A[adapter], layer.lora_B[adapter]]
    return parts


def _refuses_call(layer: Any, adapter: str, result: Any) -> str | None:
    """Returns the reason why PEFT must compute a call, or None: one of :func:`refuses`'s, or
    tensors of classes of their own."""
    if reason := refuses(layer, adapter):
        return reason
    for tensor in (result, *(part.weight for part in _parts(layer, adapter))):
        if type(tensor) not in PLAIN:
            return f"a {type(tensor).__name__} is among its tensors"
    return None


def _has_hooks_of_all() -> bool:
    """Returns whether a hook of all modules must see those of an adapter. FlopCounterMode's hooks
    only name modules, and are gone in a recomputation after it, which must save equal tensors."""
    if not any(_HOOKS_OF_ALL):
        return False
    hooks = (hook for hooks in _HOOKS_OF_ALL for hook in hooks.values())
    return any(type(getattr(hook, "__self__", None)) is not ModuleTracker for hook in hooks)


def _is_hooked(*modules: nn.Module) -> bool:
    """Returns whether a call of one of ``modules`` does more than its class's ``forward``, by hooks
    or a forward of its own."""
    for module in modules:
        own = module.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
        ):
            return True
    return False


def forward(layer: Any, x: Any, *arguments: Any, **named: Any) -> Any:
    """Replaces the ``forward`` of PEFT's Linear."""
    if not (arguments or named) and (y := _one_call(layer, x)) is not None:
        return y
    return type(layer).forward(layer, x, *arguments, **named)


def _one_call(layer: Any, x: Any) -> Tensor | None:
    """Returns the layer's result, or None if PEFT's forward is needed, also for its errors.

    A step of a small model waits for this function: modules and parameters are read from their
    dictionaries, which nn.Module's attributes search.
    """
    if layer.disable_adapters or layer.merged_adapters or layer.ephemeral_gpu_offload:
        return None
    if _has_hooks_of_all():
        return None
    adapter: Any = layer.active_adapter
    if type(adapter) is not str:
        adapter = adapter[0] if len(adapter) == 1 else None
    if type(layer.lora_variant.get(adapter)) is not _LinearVariant:
        return None
    modules = layer._modules
    base, vector, a, b = (
        modules["base_layer"],
        modules["lora_magnitude_vector"]._modules[adapter],
        modules["lora_A"]._modules[adapter],
        modules["lora_B"]._modules[adapter],
    )
    if type(vector) not in _PARTS or type(a) not in _PARTS or type(b) not in _PARTS:
        return None
    if _is_hooked(base, vector, a, b):
        return None
    own = base._parameters
    weight = own["weight"] if "weight" in own else base.weight
    bias = own["bias"] if "bias" in own else base.bias
    # In the backward pass FSDP with flat parameters sets the weights as plain attributes.
    own, of_a, of_b = vector._parameters, a._parameters, b._parameters
    magnitude = own["weight"] if "weight" in own else vector.weight
    lora_a = of_a["weight"] if "weight" in of_a else a.weight
    lora_b = of_b["weight"] if "weight" in of_b else b.weight
    if not PLAIN.issuperset(map(type, (x, weight, magnitude, lora_a, lora_b))):
        return None
    if of_a.get("bias") is not None or of_b.get("bias") is not None:
        return None
    if weight.dtype not in check.FLOATS:
        return None
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return None
    if layer.fan_in_fan_out:
        if not is_conv1d(base):
            return None
        weight = weight.T
    elif type(base) is not nn.Linear and not computes_like(base, nn.Linear):
        return None
    dropped, norm, scale = None, None, layer.scaling[adapter]
    if type(scale) is not float:
        if isinstance(scale, Tensor):
            return None
        scale = float(scale)
    if layer.training:
        dropout = modules["lora_dropout"]._modules[adapter]
        if not isinstance(dropout, nn.Identity):
            if getattr(dropout, "inplace", False):  # PEFT's base layer reads x before.
                return None
            dropped = dropout(x)
    if dora.ENABLE_DORA_CACHING or vector._dora_cache:
        norm = _norm(vector, weight, lora_a, lora_b, scale)
    try:
        if dropped is None:
            return dora_linear(x, weight, lora_a, lora_b, magnitude, scale, bias=bias, norm=norm)
        operands = x, dropped, weight, bias, lora_a, lora_b, magnitude, norm
        return corrected_linear(*operands, scale, None)
    except (TypeError, ValueError):
        if x.is_floating_point() and x.shape[-1:] == weight.shape[1:]:
            raise
        return None  # PEFT's forward raises its own error about x.


def _dropped(layer: Any, adapter: str, x: Tensor) -> Tensor | None:
    """Returns x after the adapter's dropout, or None if none is applied."""
    if not layer.training:
        return None
    dropout = layer._modules["lora_dropout"]._modules[adapter]
    return None if isinstance(dropout, nn.Identity) else dropout(x)


def _norm(magnitude: Any, weight: Any, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Returns the norm, f32[out], for PEFT's layer of the magnitude; from its cache while
    peft.helpers.DoraCaching is on."""
    if not dora.ENABLE_DORA_CACHING or magnitude.training:
        # A compiled checkpoint may have no side effect.
        if magnitude._dora_cache:
            magnitude._cache_clear()
        return factored_norm(weight, lora_a, lora_b, scale)
    if (norm := magnitude._cache_get(_CACHED, None)) is None:
        norm = factored_norm(weight, lora_a, lora_b, scale)
        magnitude._cache_store(_CACHED, norm)
    return norm


def _g(
    layer: Any, adapter: str, weight: Any, lora_a: Tensor, lora_b: Tensor, result: Tensor
) -> Tensor:
    """Returns g, f32[out], for the matrices of one adapter."""
    if type(weight) in PLAIN and weight.dtype not in check.FLOATS:  # stored in FP8
        weight = weight.to(result.dtype)
    magnitude = layer.lora_magnitude_vector[adapter]
    norm = _norm(magnitude, weight, lora_a, lora_b, layer.scaling[adapter])
    return magnitude_scale(magnitude.weight.flatten(), norm, result.dtype)


def _matrix(base: Any) -> Any:
    """Returns the weight of a base layer of any kind, quantised if torch_dora reads it so."""
    weight = getattr(base, "weight", None)
    try:
        if type(weight) not in PLAIN:
            quantised.check("weight", weight := quantised.as_matrix(weight))
    except (NotImplementedError, TypeError):
        return dequantize_module_weight(base)
    return weight


class _Variant:
    """The base of torch_dora's variants. ``forward`` adds the adapter's part to ``result``, the
    layer's result so far.

    Args:
        name: of the layer.
        warned: the reasons of warnings so far; all layers of a model share it.

    Attributes:
        reported: the reason why PEFT computes this adapter, as far as a report has told the user.
    """

    def __init__(self, name: str, warned: set[str]) -> None:
        self.name, self.warned = name, warned
        self.reported: str | None = None

    def _forward(
        self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **named: Any
    ) -> Tensor:
        if reason := _refuses_call(module, active_adapter, result):
            self._warn(active_adapter, reason)
            return super().forward(module, active_adapter, x, result, **named)  # pyright: ignore
        return self.compute(module, active_adapter, x, result)

    forward: Any = _forward

    def _warn(self, adapter: str, reason: str) -> None:
        """Warns of the first layer that PEFT computes for a reason."""
        if torch.compiler.is_compiling() or reason in (self.reported, *self.warned):
            return
        self.warned.add(reason)
        warnings.warn(
            f"PEFT computes the accelerated layer {self.name}, adapter {adapter!r}: {reason}. "
            "This warning is not repeated for other layers",
            skip_file_prefixes=_BETWEEN,
        )

    def compute(self, layer: Any, adapter: str, x: Tensor, result: Tensor) -> Tensor:
        raise NotImplementedError


class _LinearVariant(_Variant, variants.DoraLinearVariant):
    def compute(self, layer: Any, adapter: str, x: Tensor, result: Tensor) -> Tensor:
        a, b = layer.lora_A[adapter], layer.lora_B[adapter]
        base, scale = layer.get_base_layer(), layer.scaling[adapter]
        is_swapped = getattr(layer, "fan_in_fan_out", False)
        g = _g(layer, adapter, transpose(_matrix(base), is_swapped), a.weight, b.weight, result)
        dropped = _dropped(layer, adapter, x)
        if dropped is not None:
            weight = dequantize_module_weight(base).to(x.dtype)
            x, unbiased = dropped, F.linear(dropped, transpose(weight, is_swapped))
        else:
            unbiased = result if base.bias is None else result - base.bias
        lora = b(a(x)).to(unbiased.dtype)
        return result + compose_delta(unbiased, lora, g, scale)


class _EmbeddingVariant(_Variant, variants.DoraEmbeddingVariant):
    def compute(self, layer: Any, adapter: str, x: Tensor, result: Tensor) -> Tensor:
        a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        g = _g(layer, adapter, layer.get_base_layer().weight.T, a, b, result)
        lora = layer._embed(x, a.T) @ b.T
        if (embed_scale := layer._get_embed_scale()) is not None:
            lora = lora * embed_scale.to(lora.dtype)
        return compose(result, lora.to(result.dtype), g, layer.scaling[adapter])


class _ConvVariant(_Variant):
    def compute(self, layer: Any, adapter: str, x: Tensor, result: Tensor) -> Tensor:
        a, b = layer.lora_A[adapter], layer.lora_B[adapter]
        base, magnitude = layer.get_base_layer(), layer.lora_magnitude_vector[adapter]
        shape = magnitude.weight.shape[1:]  # of an input with or without a batch axis
        weight, lora_a, lora_b = (one.weight.flatten(1) for one in (base, a, b))
        g = _g(layer, adapter, weight, lora_a, lora_b, result).view(shape)
        dropped = _dropped(layer, adapter, x)
        if dropped is not None:
            x, unbiased = dropped, base._conv_forward(dropped, base.weight, None)
        else:
            unbiased = result if base.bias is None else result - base.bias.view(shape)
        return result + ((g - 1) * unbiased + g * b(a(x)) * layer.scaling[adapter])


class _Conv1dVariant(_ConvVariant, variants.DoraConv1dVariant): ...


class _Conv2dVariant(_ConvVariant, variants.DoraConv2dVariant): ...


class _Conv3dVariant(_ConvVariant, variants.DoraConv3dVariant): ...


# ``__bases__`` of each is the base of torch_dora's variants and the variant of PEFT.
THEIRS: dict[type, type] = {
    ours: ours.__bases__[1]
    for ours in (_LinearVariant, _EmbeddingVariant, _Conv1dVariant, _Conv2dVariant, _Conv3dVariant)
}
OURS = {theirs: ours for ours, theirs in THEIRS.items()}
_HOOKS_OF_ALL = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
_PARTS = frozenset(
    (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        dora.DoraLinearLayer,
        dora.DoraEmbeddingLayer,
        dora.DoraConv1dLayer,
        dora.DoraConv2dLayer,
        dora.DoraConv3dLayer,
    )
)
