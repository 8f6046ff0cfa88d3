"""Many adapters in one batch: y = g[id]∘(base + s[id]·x A[id]ᵀ B[id]) + bias, row by row.

An adapter that is served does not move, so that g = magnitude / ‖W + sBA‖ is a constant of its
slot. Ranks lie along the first axis of a slot's matrices.

Two Triton kernels read each adapter where it lies, by its real rank: `triton.bank_shrink` and
`triton.bank_expand`, which ends in y. They have no gradient; eager torch, which copies the adapter
of every row, has.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_dora.ops import choose
from torch_dora.ops.choose import Call
from torch_dora.ops.dtypes import accumulation_dtype
from torch_dora.ops.shards import is_sharded

if TYPE_CHECKING or choose.TRITON_MODE is not None:
    from torch_dora.ops.triton import bank_expand, bank_shrink
else:
    bank_expand = bank_shrink = None


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


def bank_linear(
    y: Tensor,
    x: Tensor,
    slots: Slots,
    ids: Tensor,
    bias: Tensor | None,
    implementation: str | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Returns each row of a projection's result with the adapter of its slot.

    Args:
        y: [batch, ..., out], the projection of x alone, its bias added.
        x: [batch, ..., in].
        slots: the adapters.
        ids: i64[batch], each row's slot; -1 for y itself.
        bias: [out]; never scaled.
        implementation: None, "triton" or "eager"; a named one runs or raises.
        order: of `ids`, by :func:`together`, which spares the kernels to read an adapter once a row
            where every row is one token.

    Returns:
        [batch, ..., out] in y's dtype. A row of an id that has no slot, or of an empty slot, is
        NaN.
    """
    batch, tokens = ids.shape[0], math.prod(y.shape[1:-1])
    base, rows = (t.reshape(batch, tokens, t.shape[-1]) for t in (y, x))
    if _chosen(y, x, slots, implementation) == "triton":
        order = order if tokens == 1 else None
        return bank_expand.bank_linear(base, rows, *slots, ids, order, bias).reshape(y.shape)
    count, wide = slots.scale.shape[0], accumulation_dtype(y)
    safe = ids.clamp(0, count - 1)
    z = torch.bmm(rows.to(y.dtype), slots.lora_a[safe].to(y.dtype).mT)
    lora = torch.bmm(z, slots.lora_b[safe].to(y.dtype)).to(wide)
    inner = base.to(wide)
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


def together(ids: Tensor) -> Tensor | None:
    """Returns the `order` of ids i64[batch], which lie on the CPU, or None: no kernel reads it."""
    return None if bank_shrink is None or ids.numel() == 0 else bank_shrink.together(ids)


def _chosen(y: Tensor, x: Tensor, slots: Slots, implementation: str | None) -> str:
    tensors = (x, slots.lora_a, y)
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        if implementation == "triton":
            raise NotImplementedError(
                "implementation 'triton' cannot take this call: its kernels have no gradient, and "
                "one is asked for; call the model under torch.no_grad()"
            )
        return "eager"
    call = Call(
        rows=y.numel() // max(1, y.shape[-1]),
        features=slots.lora_a.shape[1],
        dtypes=tuple(one.dtype for one in tensors),
        device=y.device.type,
        transformed=choose.transformed(),
        sharded=is_sharded(*tensors),
    )
    return choose.choose(call, implementation, bank_shrink)
