"""Finds a layer's parameters while others hold them: FSDP's shards, accelerate's offloading."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import listing
from torch_dora.ops.shards import is_sharded


def is_in_fsdp(module: nn.Module) -> bool:
    """Returns whether FSDP holds the parameters of ``module``: it gathers them for every call, and
    knows the module that it found them in."""
    return getattr(module, "_is_fsdp_managed_module", False)


def is_offloaded(module: nn.Module) -> bool:
    """Returns whether accelerate keeps the parameters of ``module`` elsewhere between calls."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(one, "offload", False) for one in (hook, *getattr(hook, "hooks", ())))


def is_lent(parameter: Tensor) -> bool:
    """Returns whether ``parameter`` stands in a layer for one call alone: a transform of torch.func
    or torch.export has put it there, and puts back what was."""
    return not isinstance(parameter, nn.Parameter) or torch.compiler.is_exporting()


def check_magnitude(layer: Any) -> None:
    """Raises TypeError where FSDP hands the layer a magnitude of 16 bits."""
    if layer.magnitude.dtype.itemsize == 2 and is_in_fsdp(layer):
        raise TypeError(
            f"magnitude is {layer.magnitude.dtype} in a call under FSDP, whose mp_policy casts "
            "every parameter to its param_dtype; expected float32: rounded to 16 bits, a magnitude "
            "no longer is its norm. Leave param_dtype None, and load the base model in the 16 bits "
            "that it should compute in: adapters stay float32 by themselves"
        )


def watch_offloaded(layer: Any) -> None:
    """Makes a backward pass raise RuntimeError where it would reach an adapter of an offloaded
    layer: the call has copies of the parameters, and their gradients are lost with them."""
    if not (torch.is_grad_enabled() and is_offloaded(layer)):
        return
    for name in ADAPTER_NAMES:
        parameter = getattr(layer, name)
        if parameter.requires_grad:
            parameter.register_hook(_refuse_gradient)


def _refuse_gradient(gradient: Tensor) -> Tensor:
    raise RuntimeError(
        "a backward pass reached an adapter whose layer accelerate offloads: the gradient would be "
        "that of a copy, and lost with it. Train with the adapted layers on one device each "
        "(a device_map without cpu and disk, or FSDP with CPUOffloadPolicy), or freeze the adapter "
        "by torch_dora.freeze"
    )


def refuse_fsdp(layers: Iterable[tuple[str, nn.Module]], remedy: str) -> None:
    """Raises NotImplementedError that lists those of the layers that FSDP holds."""
    if held := [name for name, layer in layers if is_in_fsdp(layer)]:
        raise NotImplementedError(
            "FSDP holds the parameters of these layers, and would not know the layers in their "
            f"place; {remedy}:{listing(held)}"
        )


def refuse_flat(layers: Iterable[tuple[str, Any]]) -> None:
    """Raises NotImplementedError that lists those of the layers whose weights are flat pieces, as
    FSDP1 leaves them between calls."""
    if flat := [name for name, one in layers if is_in_fsdp(one) and one.weight.ndim < 2]:
        raise NotImplementedError(
            "FullyShardedDataParallel keeps flat pieces of the weights of these layers between "
            "calls; let every call take its norms, call torch_dora.freeze before the model is "
            f"wrapped, or use fully_shard in its place:{listing(flat)}"
        )


def refuse_offloaded(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises NotImplementedError that lists those of the layers that accelerate offloads."""
    if offloaded := [name for name, layer in layers if is_offloaded(layer)]:
        raise NotImplementedError(
            "accelerate has offloaded the parameters of these layers, whose own tensors are empty; "
            "call accelerate.hooks.remove_hook_from_submodules(model), which loads them, "
            f"first:{listing(offloaded)}"
        )


def refuse_held(layers: Iterable[tuple[str, nn.Module]], remedy: str) -> None:
    """Raises NotImplementedError where others hold tensors of layers that are to be replaced."""
    layers = list(layers)
    refuse_offloaded(layers)
    refuse_fsdp(layers, remedy)
    _refuse_computed(layers)


def _refuse_computed(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises NotImplementedError that lists those tensors of the layers that hooks compute, and the
    weights that are parametrized: the base would get what was computed."""
    if computed := [
        f"{name}.{tensor}"
        for name, layer in layers
        for tensor in ("weight", *ADAPTER_NAMES)
        if any(f"{tensor}{end}" in layer._parameters for end in ("_orig", "_g"))
        or (tensor == "weight" and parametrize.is_parametrized(layer, tensor))
    ]:
        raise NotImplementedError(
            "these tensors of adapted layers are computed from others, by hooks, which would stay "
            "behind without them, or by a parametrization; call torch.nn.utils.prune.remove (or "
            f"remove_weight_norm, parametrize.remove_parametrizations, …) first:{listing(computed)}"
        )


def refuse_sharded(layers: Iterable[tuple[str, Any]]) -> None:
    """Raises NotImplementedError that lists those of the layers whose weights are DTensors."""
    if parts := [name for name, layer in layers if is_sharded(layer.weight)]:
        raise NotImplementedError(
            "the weights of these layers are DTensors, of which every process has a part, and the "
            "adapters of a bank lie whole on one device; make the bank of a model that neither "
            f"fully_shard nor parallelize_module has sharded:{listing(parts)}"
        )


def refuse_meta(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises NotImplementedError that lists those of the tensors that are on the meta device."""
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise NotImplementedError(
            "these parameters are on the meta device, which keeps no values; make them real first, "
            "by model.to_empty(device=…) and loading the base model's weights (into a model that "
            f"is to be sharded: apply_dora, fully_shard, to_empty, load):{listing(empty)}"
        )
