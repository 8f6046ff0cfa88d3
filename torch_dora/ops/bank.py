"""Many adapters in one batch: y = g[id]∘(base + s[id]·x A[id]ᵀ B[id]) + bias, row by row.

Adapters are constant while they are served, so g = magnitude / ‖W + sBA‖ is stored per slot. The
rank is the first axis of both matrices of a slot.

Two Triton kernels read each adapter in place, up to its real rank: `triton.bank_shrink` and
`triton.bank_expand`, which also computes y. They have no gradient. Eager torch has one, but copies
the adapter of every row.
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
    """The adapters of one projection, in slots: lora_a [slots, rank, in] and lora_b [slots, rank,
    out], zero beyond an adapter's own rank; g f32[slots, out], 1 for LoRA and NaN in an empty slot;
    scale f32[slots]; and rank i32[slots], 0 if the adapter does not adapt this projection."""

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
    row_groups: Tensor | None = None,
) -> Tensor:
    """Applies to each row of y [batch, ..., out], the base projection of x [batch, ..., in] with
    its bias [out], the adapter in slot ids i64[batch]; -1 is y itself. A row whose id is not a
    slot, or whose slot is empty, is NaN.

    A named implementation runs or raises. With `row_groups`, :func:`group_rows` of the ids, the
    kernels read an adapter once per group if every row is one token.
    """
    batch, tokens = ids.shape[0], math.prod(y.shape[1:-1])
    base, rows = (t.reshape(batch, tokens, t.shape[-1]) for t in (y, x))
    if _choose(y, x, slots, implementation) == "triton":
        row_groups = row_groups if tokens == 1 else None
        return bank_expand.bank_linear(base, rows, *slots, ids, row_groups, bias).reshape(y.shape)
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
    base_only = (ids == -1).reshape(batch, *(1,) * (y.ndim - 1))
    invalid = (ids < -1).reshape(base_only.shape)
    adapted = adapted.to(y.dtype).reshape(y.shape).masked_fill(invalid, torch.nan)
    return torch.where(base_only, y, adapted)


def group_rows(ids: Tensor) -> Tensor | None:
    """Returns the `row_groups` of ids i64[batch] on the CPU, or None if no kernel would use
    them."""
    return None if bank_shrink is None or ids.numel() == 0 else bank_shrink.group_rows(ids)


def _choose(y: Tensor, x: Tensor, slots: Slots, implementation: str | None) -> str:
    tensors = (x, slots.lora_a, y)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        if implementation == "triton":
            raise NotImplementedError(
                "implementation 'triton' cannot run this call: its kernels have no gradient, and a "
                "tensor requires one; call the model under torch.no_grad()"
            )
        return "eager"
    call = Call(
        rows=y.numel() // max(1, y.shape[-1]),
        features=slots.lora_a.shape[1],
        dtypes=tuple(tensor.dtype for tensor in tensors),
        device=y.device.type,
        transformed=choose.in_transform(),
        sharded=is_sharded(*tensors),
    )
    return choose.choose(call, implementation, bank_shrink)
