"""Each row's product with the B of its slot, and what follows it, in one pass over the result:
y = g[slot]∘(base + s[slot]·z B[slot]) + bias, where base is what it is without its bias.

base, y: [batch, time, out] and B: [slots, ranks, out], all fp16 or bf16; z: f32[batch, time,
ranks], to be rounded to B's dtype; g: f32[slots, out], s: f32[slots], bias: [out]. A row of slot -1
is base, bit for bit; one of no slot is NaN.

Bytes: 1 read and 1 write of batch·time·out, and B once for each program's tokens, those of
`bank_shrink`, from the level-2 cache but for the first, of the real rank.
"""

import dataclasses

import torch
import triton.language as tl
from torch import Tensor

from torch_dora.ops.choose import TRITON_MODE
from torch_dora.ops.operator import operator
from torch_dora.ops.triton import bank_shrink
from torch_dora.ops.triton.jit import cdiv, jit, next_power_of_2


@dataclasses.dataclass(frozen=True)
class Config:
    """A program makes a tile of ``columns`` for the tokens that `bank_shrink` takes at once."""

    columns: int = 128
    warps: int = 4


CONFIG = Config()


@jit
def _kernel(
    base_ptr,  # [batch, time, out]
    z_ptr,  # f32[batch, time, ranks]
    b_ptr,  # [slots, ranks, out]
    g_ptr,  # f32[slots, out]
    scale_ptr,  # f32[slots]
    ids_ptr,  # i64[batch]
    order_ptr,  # i32[programs, ROWS], not read unless ORDERED
    rank_ptr,  # i32[slots]
    bias_ptr,  # [out], not read unless HAS_BIAS
    y_ptr,  # [batch, time, out]
    time,
    features,
    slots,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ORDERED: tl.constexpr,
    WIDEN: tl.constexpr,  # the same products; the interpreter has none of bf16
):
    row, place, here = bank_shrink.places(order_ptr, time, tl.program_id(0), ROWS, ORDERED)
    given = tl.load(ids_ptr + row)
    known = (given >= 0) & (given < slots)
    slot = tl.where(known, given, 0).to(tl.int64)
    rank = tl.where(known, tl.load(rank_ptr + slot), 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    wide = column < features
    offset = place[:, None] * features + column[None, :]  # [ROWS, COLUMNS]
    mask = here[:, None] & wide[None, :]
    stored = tl.load(base_ptr + offset, mask=mask, other=0.0)
    base = stored.to(tl.float32)
    bias = tl.zeros((1, COLUMNS), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=wide, other=0.0).to(tl.float32)[None, :]
    lora = tl.zeros((ROWS, COLUMNS), tl.float32)
    if rank > 0:
        r = tl.arange(0, ROOM)  # [ROOM]
        z = tl.load(
            z_ptr + place[:, None] * RANKS + r[None, :],
            mask=here[:, None] & (r < rank)[None, :],
            other=0.0,
        ).to(b_ptr.dtype.element_ty)
        b = tl.load(
            b_ptr + (slot * RANKS + r[:, None]) * features + column[None, :],
            mask=(r < rank)[:, None] & wide[None, :],
            other=0.0,
        )
        if WIDEN:
            z, b = z.to(tl.float32), b.to(tl.float32)
        lora = tl.dot(z, b, lora)
    g = tl.load(g_ptr + slot * features + column, mask=wide, other=0.0).to(tl.float32)[None, :]
    scale = tl.load(scale_ptr + slot).to(tl.float32)
    y = g * ((base - bias) + scale * lora) + bias
    y = tl.where(known, y, float("nan")).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offset, tl.where(given == -1, stored, y), mask=mask)


@operator("torch_dora::bank_linear")
def bank_linear(
    base: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    g: Tensor,
    scale: Tensor,
    rank: Tensor,
    ids: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Returns y of x [batch, time, in], by both kernels; `order` is that of rows of one token."""
    base, ids = base.contiguous(), ids.contiguous()
    batch, time, features = base.shape
    slots, ranks, _ = lora_b.shape
    y = torch.empty_like(base)
    if y.numel() == 0:
        return y
    z = bank_shrink.launch(x.contiguous(), lora_a, ids, order, rank)
    rows = bank_shrink.rows_of(time)
    programs = batch * cdiv(time, rows) if order is None else order.shape[0]
    _kernel[(programs, cdiv(features, CONFIG.columns))](
        base,
        z,
        lora_b,
        g,
        scale,
        ids,
        ids if order is None else order,
        rank,
        g if bias is None else bias.contiguous(),
        y,
        time,
        features,
        slots,
        RANKS=ranks,
        ROOM=max(bank_shrink.LEAST_ROWS, next_power_of_2(ranks)),
        HAS_BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=CONFIG.columns,
        ORDERED=order is not None,
        WIDEN=TRITON_MODE == "interpreted",
        num_warps=CONFIG.warps,
    )
    return y


@bank_linear.op.register_fake
def _(base, x, lora_a, lora_b, g, scale, rank, ids, order, bias):
    return base.new_empty(base.shape)
