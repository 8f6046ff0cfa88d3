"""Norms as values: compute them once, and reuse them in later calls.

The norm depends only on weight, lora_a and lora_b. These do not change between two optimizer steps.
So the micro-steps of gradient accumulation, and the second forward pass of gradient checkpointing,
can share one norm:

    for batches in steps:
        with torch_dora.with_norms(model, torch_dora.norms(model)):
            for batch in batches:
                loss(model, batch).backward()
        optimizer.step()

The results are bit for bit the same as when every call computes the norm.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import listing
from torch_dora.layers import adapted_layers, dora_layers, placement, tied_modules
from torch_dora.ops import check, shards
from torch_dora.ops.shards import full_tensor, is_sharded


@torch.no_grad()
def norms(model: nn.Module) -> dict[str, Tensor]:
    """Returns the current norm of every DoRA layer of ``model``, by the layer's name.

    Each norm is f32[out] (f64 for an fp64 layer) and detached. If the model is sharded, all
    processes must call this function, and each gets the full norms.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` has no DoRA layer.
        NotImplementedError: accelerate has offloaded a layer, FSDP1 has flattened its weight, or
            some of its tensors, or its sharded weight, are on the meta device.
    """
    layers = adapted_layers(model)
    placement.refuse_offloaded(layers.items())
    placement.refuse_fsdp1(layers.items())
    placement.refuse_partly_meta(layers.items())
    placement.refuse_meta(
        (f"{name}.weight", layer.weight)
        for name, layer in layers.items()
        if is_sharded(layer.weight)
    )
    return {name: full_tensor(layer.norm()) for name, layer in layers.items()}


@torch.no_grad()
def reset_magnitudes(model: nn.Module) -> None:
    """Sets every magnitude of ``model`` to the current norm of its layer, in place, so that g = 1.

    Call this after other weights were put into an adapted model. The magnitudes that
    :func:`~torch_dora.apply_dora` sets are the norms of the weights of that moment; with them, even
    an adapter whose lora_b is zero would scale the new weights. A trained adapter loses what its
    magnitudes have learned: it becomes the LoRA adapter of its lora_a and lora_b.

    If the model is sharded, all processes must call this function.

    Raises:
        TypeError, ValueError, NotImplementedError: the same errors as :func:`norms`.
    """
    layers = adapted_layers(model)
    for name, norm in norms(model).items():
        shards.fill(layers[name].magnitude, norm)
        if layers[name].constant_norm is not None:
            layers[name].constant_norm = norm


@contextlib.contextmanager
def with_norms(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Makes the DoRA layers of ``model`` use these norms inside a ``with`` statement.

    The values must come from the same adapters and weights that the model has inside the statement.
    A step of a ``torch.optim`` optimizer changes these: from one inside the statement on, and in
    the closure that it calls, the layers compute their norms in every call. Other changes are not
    noticed: with other norms the model computes a wrong result. Gradients reach the adapters as
    usual, since the norm is a constant under differentiation.

    - With activation checkpointing, run the backward pass inside the statement too. Otherwise the
      recomputation computes the norms again.
    - Copy the model outside the statement: a copy that is made inside keeps the norms.
    - Wrap the model outside too: a DistributedDataParallel that is made inside expects the norms as
      buffers in every later call.

    Args:
        model: a model with DoRA layers.
        values: the result of :func:`norms` for this model.

    Raises:
        ValueError: ``model`` has no DoRA layer; a layer has no norm in ``values``; a norm has no
            layer, or not the shape of its layer's magnitude, or is on the meta device.
        TypeError: ``model`` is not a module, ``values`` is not a dict, or a norm is not a tensor of
            float32 or float64.
    """
    layers = adapted_layers(model)
    if not isinstance(values, Mapping):
        raise TypeError(
            f"values is a {type(values).__name__}; expected the dict that torch_dora.norms(model) "
            "returns"
        )
    if layers.keys() != values.keys():
        missing = [f"no norm for layer {name}" for name in layers.keys() - values.keys()]
        unknown = [f"no layer for norm {name}" for name in values.keys() - layers.keys()]
        raise ValueError(
            "values does not match the DoRA layers of this model; expected the result of "
            f"torch_dora.norms(model):{listing(missing + unknown)}"
        )
    for name, layer in layers.items():
        check.is_float(f"values[{name!r}]", values[name])
        if values[name].dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"values[{name!r}] has dtype {values[name].dtype}; expected float32, as returned "
                "by torch_dora.norms(model): g is only as exact as its norm"
            )
        check.has_shape(f"values[{name!r}]", values[name], tuple(layer.magnitude.shape), "[out]")
        if values[name].is_meta and not layer.magnitude.is_meta:
            raise ValueError(
                f"values[{name!r}] is on the meta device, which stores no values; expected a "
                "tensor with values: compute the norms of a model on another device"
            )
    before = {name: layer.constant_norm for name, layer in layers.items()}
    given = set(_changed_by_steps(layers))

    def drop(optimizer: Optimizer, *_: Any) -> None:
        stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if not stepped.isdisjoint(given.union(_changed_by_steps(layers))):
            for name, layer in layers.items():
                before[name] = layer.constant_norm = None

    # Before a step, which may change the adapters between calls of its closure. torch.compile
    # cannot trace the registration.
    is_compiling = torch.compiler.is_compiling()
    handle = None if is_compiling else register_optimizer_step_pre_hook(drop)
    try:
        for name, layer in layers.items():
            layer.constant_norm = values[name].detach()
        yield
    finally:
        if handle is not None:
            handle.remove()
        for name, layer in layers.items():
            layer.constant_norm = before[name]


def _changed_by_steps(layers: Mapping[str, Any]) -> Iterator[int]:
    """Yields the ids of the tensors of ``layers`` that their norms depend on."""
    for layer in layers.values():
        yield from (id(getattr(layer, name, None)) for name in ("weight", "lora_a", "lora_b"))


def freeze(model: nn.Module) -> nn.Module:
    """Makes ``model`` ready for inference, in place, and returns it.

    - The DoRA layers keep their current norms: later calls do not compute the norms again.
    - The adapters no longer require a gradient.
    - The whole model is set to evaluation mode, so there is no dropout.

    Move and cast the model before this call. To keep a trainable model, freeze
    ``copy.deepcopy(model)``. Setting an adapter by hand afterwards does not update the norm;
    loading one with ``load_state_dict`` does. ``model.load_state_dict`` also updates the norm if a
    weight is loaded by the name of another module of ``model`` that has the same weight. If it is
    loaded by that module's own ``load_state_dict``, or if that module is not in ``model``, the norm
    stays outdated until you call this function again.

    Raises:
        TypeError, ValueError, NotImplementedError: the same errors as :func:`norms`.
    """
    values = norms(model)
    for name, layer in adapted_layers(model).items():
        layer.constant_norm = values[name]
        for parameter in ADAPTER_NAMES:
            getattr(layer, parameter).requires_grad_(False)
    if _renew_norms_of_tied_weights not in model._load_state_dict_post_hooks.values():
        model.register_load_state_dict_post_hook(_renew_norms_of_tied_weights)
    return model.eval()


@torch.no_grad()
def _renew_norms_of_tied_weights(model: nn.Module, _: object) -> None:
    """Computes constant norms again after ``load_state_dict``, which may have changed a weight
    under the name of another module that it is tied to."""
    tied = tied_modules(model)
    for name, layer in dora_layers(model):
        if layer.constant_norm is not None and name in tied:
            layer.constant_norm = full_tensor(layer.norm())
