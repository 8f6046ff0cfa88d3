"""The norm once, not every time: kept in the model while the adapters stand still.

The norm depends on weight, lora_a and lora_b alone. Between two optimizer steps none of them moves,
so micro-steps of gradient accumulation, and the second forward of gradient checkpointing, can share
one:

    torch_dora.keep_norms(model)                   # once, after apply_dora

    for batches in steps:
        torch_dora.refresh_norms(model)            # recomputes what an update has changed
        for batch in batches:
            loss(model, batch).backward()
        optimizer.step()

Results are bit for bit those of recomputing. A kept norm carries a fingerprint of what it was
computed from, and a layer compares it on every call, on the device (it reads the adapter, which is
small beside the weight): a stale norm makes the layer's output NaN, never quietly wrong. Of the
frozen weight the fingerprint reads every 64th row: enough to notice other weights.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

WEIGHT_STRIDE = 64

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def keep_norms(model: nn.Module) -> None:
    """Compute the norm of every DoRA layer of ``model`` and keep it in the layer.

    Raises:
        ValueError: there is no DoRA layer in ``model``.
    """
    for layer in _dora_layers(model):
        _keep(layer)


@torch.no_grad()
def refresh_norms(model: nn.Module) -> None:
    """Recompute those kept norms of ``model`` whose adapter or weight has changed.

    Call it after every update and before the next forward pass, outside ``torch.compile``: it waits
    for the device once, to learn what has changed.

    Raises:
        ValueError: there is no DoRA layer in ``model``, or one keeps no norm.
    """
    layers = list(_dora_layers(model))
    if any(getattr(layer, "kept_norm", None) is None for layer in layers):
        raise ValueError(
            "a DoRA layer of this model keeps no norm; call torch_dora.keep_norms(model) first"
        )
    current = [_is_current(layer) for layer in layers]
    home = current[0].device
    flags = torch.stack([flag.to(home, non_blocking=True) for flag in current]).tolist()
    for layer, unchanged in zip(layers, flags, strict=True):
        if not unchanged:
            _keep(layer)


def drop_norms(model: nn.Module) -> None:
    """Let every DoRA layer of ``model`` compute its norm on each call again.

    Raises:
        ValueError: there is no DoRA layer in ``model``.
    """
    for layer in _dora_layers(model):
        layer.kept_norm = layer.kept_fingerprint = None


def current_norm(layer: Any) -> Tensor:
    """The norm that a call of ``layer`` uses: the kept one, NaN where it is stale, or a new one."""
    kept = getattr(layer, "kept_norm", None)
    if kept is None:
        return layer.norm()
    with torch.no_grad():
        return torch.where(_is_current(layer), kept, torch.nan)


@torch.no_grad()
def _keep(layer: Any) -> None:
    layer.register_buffer("kept_norm", layer.norm(), persistent=False)
    layer.register_buffer("kept_fingerprint", _fingerprint(layer), persistent=False)


def _is_current(layer: Any) -> Tensor:
    return (layer.kept_fingerprint == _fingerprint(layer)).all()


def _fingerprint(layer: Any) -> Tensor:
    """int64[3]: sums of the bit patterns of lora_a, lora_b and some rows of the weight.

    Sums of integers are the same in any order, on any device.
    """
    tensors = (layer.lora_a, layer.lora_b, layer.weight[::WEIGHT_STRIDE])
    return torch.stack(
        [t.detach().view(_BITS[t.dtype.itemsize]).sum(dtype=torch.int64) for t in tensors]
    )


def _dora_layers(model: nn.Module) -> Iterator[Any]:
    found = False
    for module in model.modules():
        if hasattr(module, "lora_a") and hasattr(module, "magnitude"):
            found = True
            yield module
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no DoRA layer; build it with one, or call apply_dora first"
        )
