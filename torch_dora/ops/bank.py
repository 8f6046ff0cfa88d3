"""Many adapters in one batch: y = g[id]∘(base + s[id]·x A[id]ᵀ B[id]) + bias, row by row.

An adapter that is served does not move, so that g = magnitude / ‖W + sBA‖ is a constant of its
slot. Ranks lie along the first axis of a slot's matrices.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dora.ops.dtypes import accumulation_dtype


class Slots(NamedTuple):
    """The adapters of one projection, in slots.

    Attributes:
        lora_a: [slots, rank, in], zero beyond the rank that an adapter has.
        lora_b: [slots, rank, out], likewise.
        g: f32[slots, out], magnitude over norm; 1 for LoRA; NaN in a slot without an adapter.
        scale: f32[slots].
        rank: i32[slots], of each adapter; 0 where it leaves the projection alone.
    """

    lora_a: Tensor
    lora_b: Tensor
    g: Tensor
    scale: Tensor
    rank: Tensor


def bank_linear(y: Tensor, x: Tensor, slots: Slots, ids: Tensor, bias: Tensor | None) -> Tensor:
    """Returns each row of a projection's result with the adapter of its slot.

    Args:
        y: [batch, ..., out], the projection of x alone, its bias added.
        x: [batch, ..., in].
        slots: the adapters.
        ids: i64[batch], each row's slot; -1 for y itself.
        bias: [out]; never scaled.

    Returns:
        [batch, ..., out] in y's dtype. A row of an id that has no slot, or of an empty slot, is
        NaN.
    """
    count, batch, wide = slots.scale.shape[0], ids.shape[0], accumulation_dtype(y)
    safe = ids.clamp(0, count - 1)
    rows = x.reshape(batch, -1, x.shape[-1]).to(y.dtype)
    z = torch.bmm(rows, slots.lora_a[safe].to(y.dtype).mT)
    lora = torch.bmm(z, slots.lora_b[safe].to(y.dtype)).to(wide)
    inner = y.reshape(batch, -1, y.shape[-1]).to(wide)
    if bias is not None:
        inner = inner - bias.to(wide)
    inner = torch.addcmul(inner, lora, slots.scale[safe, None, None].to(wide))
    g = slots.g[safe].to(wide).masked_fill((ids >= count)[:, None], torch.nan)
    adapted = g[:, None] * inner
    if bias is not None:
        adapted = adapted + bias.to(wide)
    alone = (ids == -1).reshape(batch, *(1,) * (y.ndim - 1))
    below = (ids < -1).reshape(alone.shape)
    adapted = adapted.to(y.dtype).reshape(y.shape).masked_fill(below, torch.nan)
    return torch.where(alone, y, adapted)
