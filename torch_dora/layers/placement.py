"""Detects layers whose parameters another library manages (FSDP's shards, accelerate's offloading)
or that compute their weights, and raises errors for them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import listing
from torch_dora.ops.operator import is_exporting
from torch_dora.ops.shards import is_sharded


def is_in_fsdp(module: nn.Module) -> bool:
    """Returns whether FSDP manages the parameters of ``module``: it gathers them for every call,
    and keeps a reference to this module."""
    return getattr(module, "_is_fsdp_managed_module", False)


def is_offloaded(module: nn.Module) -> bool:
    """Returns whether accelerate keeps the parameters of ``module`` elsewhere between calls."""
    # Asking the module takes several µs where it has no such attribute.
    hook = vars(module).get("_hf_hook")
    return any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ())))


def is_temporary(parameter: Tensor) -> bool:
    """Returns whether ``parameter`` is in its layer for a single call: torch.func and torch.export
    replace the parameters of a module and restore them afterwards."""
    return not isinstance(parameter, nn.Parameter) or is_exporting()


def check_magnitude(layer: Any) -> None:
    """Raises TypeError if FSDP has cast the layer's magnitude to 16 bits."""
    if layer.magnitude.dtype.itemsize == 2 and is_in_fsdp(layer):
        raise TypeError(
            f"magnitude is {layer.magnitude.dtype} in a call under FSDP, whose mp_policy casts "
            "every parameter to its param_dtype; expected float32: rounded to 16 bits, a magnitude "
            "no longer equals its norm. Leave param_dtype None, and load the base model in the "
            "16-bit dtype that it should compute in: the adapters stay float32"
        )


def refuse_offloaded_gradients(layer: Any) -> None:
    """Makes a backward pass raise RuntimeError if it reaches an adapter of an offloaded layer: the
    call uses copies of the parameters, and the gradients of the copies are lost."""
    if not (torch.is_grad_enabled() and is_offloaded(layer)):
        return
    for name in ADAPTER_NAMES:
        parameter = getattr(layer, name)
        if parameter.requires_grad:
            parameter.register_hook(_refuse_gradient)


def _refuse_gradient(gradient: Tensor) -> Tensor:
    raise RuntimeError(
        "a backward pass reached an adapter whose layer accelerate offloads: the gradient would "
        "belong to a temporary copy, and be lost with it. Keep every adapted layer on a device in "
        "training (a device_map without cpu and disk, or FSDP with CPUOffloadPolicy), or freeze "
        "the adapter with torch_dora.freeze"
    )


def refuse_partitioned(parameters: Iterable[tuple[str, Any]]) -> None:
    """Raises NotImplementedError that lists the parameters that DeepSpeed's ZeRO-3 manages: between
    calls each process has a flat part of them only."""
    if partitioned := [
        name
        for name, parameter in parameters
        if hasattr(parameter, "ds_id") or hasattr(parameter, "ds_shape")
    ]:
        raise NotImplementedError(
            "DeepSpeed's ZeRO-3 has partitioned these parameters, and would not manage the "
            "adapter's; adapt first: load the model and call apply_dora or load_adapter outside "
            "of deepspeed.zero.Init (which transformers uses while a ZeRO-3 configuration is "
            "active: load before TrainingArguments is created), and then pass the model to "
            f"deepspeed.initialize or the Trainer:{listing(partitioned)}"
        )


def refuse_fsdp(layers: Iterable[tuple[str, nn.Module]], remedy: str) -> None:
    """Raises NotImplementedError that lists the layers that FSDP manages."""
    if managed := [name for name, layer in layers if is_in_fsdp(layer)]:
        raise NotImplementedError(
            "FSDP manages the parameters of these layers, and would not manage the new layers; "
            f"{remedy}:{listing(managed)}"
        )


def refuse_fsdp1(layers: Iterable[tuple[str, Any]]) -> None:
    """Raises NotImplementedError that lists the layers whose weights are flat pieces: FSDP1 keeps
    them so between calls."""
    if flat := [name for name, layer in layers if is_in_fsdp(layer) and layer.weight.ndim < 2]:
        raise NotImplementedError(
            "FullyShardedDataParallel keeps flat pieces of the weights of these layers between "
            "calls; let every call compute its norms, call torch_dora.freeze before the model is "
            f"wrapped, or use fully_shard instead:{listing(flat)}"
        )


def refuse_offloaded(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises NotImplementedError that lists the layers that accelerate offloads, or that ZeRO-3 has
    partitioned."""
    layers = list(layers)
    refuse_ungathered(layers)
    if offloaded := [name for name, layer in layers if is_offloaded(layer)]:
        raise NotImplementedError(
            "accelerate has offloaded the parameters of these layers, so the layers' own tensors "
            "are empty; first call accelerate.hooks.remove_hook_from_submodules(model), which "
            f"loads them:{listing(offloaded)}"
        )


def refuse_ungathered(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises NotImplementedError that lists the layers with parameters of which DeepSpeed's ZeRO-3
    has left an empty tensor."""
    if partitioned := [
        name
        for name, layer in layers
        if any(hasattr(one, "ds_id") and not one.numel() for one in layer.parameters(recurse=False))
    ]:
        raise NotImplementedError(
            "DeepSpeed's ZeRO-3 has partitioned the parameters of these layers; call this inside "
            "of deepspeed.zero.GatheredParameters(model.parameters()), in all processes:"
            f"{listing(partitioned)}"
        )


def refuse_unreplaceable(layers: Iterable[tuple[str, nn.Module]], remedy: str) -> None:
    """Raises NotImplementedError if a layer that is to be replaced is offloaded, in FSDP, or has
    tensors that are computed from others."""
    layers = list(layers)
    refuse_offloaded(layers)
    refuse_fsdp(layers, remedy)
    _refuse_computed(layers)


def _refuse_computed(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises NotImplementedError that lists the tensors that hooks compute, and parametrized
    weights: the base layer would get the computed tensor instead of its sources."""
    if computed := [
        f"{name}.{tensor}"
        for name, layer in layers
        for tensor in ("weight", *ADAPTER_NAMES)
        if any(f"{tensor}{end}" in layer._parameters for end in ("_orig", "_g"))
        or (tensor == "weight" and parametrize.is_parametrized(layer, tensor))
    ]:
        raise NotImplementedError(
            "these tensors of adapted layers are computed from others, by hooks or by a "
            "parametrization, which the base layer would not have; first call "
            "torch.nn.utils.prune.remove (or remove_weight_norm, "
            f"parametrize.remove_parametrizations, …):{listing(computed)}"
        )


def refuse_customised_base(base: Any) -> None:
    """Raises NotImplementedError if ``base`` has a replaced forward, parametrized tensors or a
    weight that hooks compute."""
    # accelerate replaces forward too, but its function computes the same result.
    if "forward" in vars(base) and not hasattr(base, "_hf_hook"):
        raise NotImplementedError(
            "base.forward was replaced on this instance, and the adapted layer would not call "
            "it; delete that attribute, or make the replacement a forward hook"
        )
    if parametrize.is_parametrized(base):
        parametrized: Any = base.parametrizations
        tensors = ", ".join(
            f"{name} by {' and '.join(type(function).__name__ for function in functions)}"
            for name, functions in parametrized.items()
        )
        raise NotImplementedError(
            f"base has parametrized tensors, {tensors}, which every call computes again; call "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if base._parameters.get("weight") is None:
        raise NotImplementedError(
            "base.weight is not a parameter but computed from other parameters "
            f"({', '.join(base._parameters)}), as by the hooks of torch.nn.utils.weight_norm, "
            "spectral_norm and prune; remove them first, with remove_weight_norm and so on"
        )


def refuse_sharded(layers: Iterable[tuple[str, Any]]) -> None:
    """Raises NotImplementedError that lists the layers whose weights are DTensors."""
    if sharded := [name for name, layer in layers if is_sharded(layer.weight)]:
        raise NotImplementedError(
            "the weights of these layers are DTensors, sharded over processes, but the adapters of "
            "a bank are full tensors on one device; make the bank for a model that neither "
            f"fully_shard nor parallelize_module has sharded:{listing(sharded)}"
        )


def refuse_partly_meta(layers: Iterable[tuple[str, Any]]) -> None:
    """Raises NotImplementedError that lists the tensors on the meta device of the layers that have
    other tensors elsewhere, as after assigning the base model's weights alone."""
    tensors = {
        name: {f"{name}.{tensor}": getattr(layer, tensor) for tensor in ("weight", *ADAPTER_NAMES)}
        for name, layer in layers
    }
    refuse_meta(
        item
        for of_layer in tensors.values()
        if not all(tensor.is_meta for tensor in of_layer.values())
        for item in of_layer.items()
    )


def refuse_meta(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises NotImplementedError that lists the tensors on the meta device."""
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise NotImplementedError(
            "these parameters are on the meta device, which stores no values; first call "
            "model.to_empty(device=…) and load the base model's weights (for a model to be "
            f"sharded: apply_dora, fully_shard, to_empty, load):{listing(empty)}"
        )
