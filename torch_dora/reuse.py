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

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def keep_norms(model: nn.Module) -> None:
    """Compute the norm of every DoRA layer of ``model`` and keep it in the layer.

    Raises:
        ValueError: there is no DoRA layer in ``model``.
    """
    for layer in _dora_layers(model):
        layer.register_buffer("position_weights", _position_weights(layer), persistent=False)
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
        layer.kept_norm = layer.kept_fingerprint = layer.position_weights = None


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
    """int64[6]: digests of lora_a, lora_b and some rows of the weight."""
    return torch.cat([_digest(matrix, layer.position_weights) for matrix in _watched(layer)])


def _digest(matrix: Tensor, position_weights: Tensor) -> Tensor:
    """int64[2]: the sum of the matrix's bits, and the same weighted by position.

    A position's weight is its row's times its column's. Both are odd, so that no change of a single
    element leaves the second as it was. Sums of integers are the same in any order, on any device.
    """
    if matrix.dtype.itemsize == 8:
        # As two halves: changes of two signs would add up to none modulo 2⁶⁴.
        matrix = matrix.contiguous().view(torch.int32)
    bits = matrix.view(_BITS[matrix.dtype.itemsize])
    of_columns, of_rows = position_weights[: sum(bits.shape)].split([bits.shape[1], bits.shape[0]])
    weighted = (bits * of_columns).sum(1) * of_rows
    return torch.stack([bits.sum(dtype=torch.int64), weighted.sum()])


def _watched(layer: Any) -> list[Tensor]:
    """What the norm is computed from, as matrices: all of the adapter, some rows of the weight."""
    tensors = (layer.lora_a, layer.lora_b, layer.weight[::WEIGHT_STRIDE])
    return [tensor.detach().flatten(1) for tensor in tensors]


def _position_weights(layer: Any) -> Tensor:
    """int64[n]: odd numbers below 2³¹ that follow no pattern, enough for the columns and rows of
    each matrix that is watched."""
    matrices = _watched(layer)
    # Twice the columns, since eight bytes are two of them, and a model may be cast.
    count = max(len(matrix) + 2 * matrix.shape[1] for matrix in matrices)
    seeded = torch.Generator().manual_seed(0)
    odd = torch.randint(2**30, (count,), generator=seeded) * 2 + 1
    return odd.to(matrices[0].device)


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
