"""Multiplies each row by the B of its slot and computes the result, in one pass over the result.

    y = g[slot]∘(base + s[slot]·z B[slot]) + bias, where base is without its bias; or z B[slot]

base, y: [batch, time, out] and B: [slots, ranks, out], all fp16 or bf16; z: f32[batch, time,
ranks], rounded to B's dtype; g: f32[slots, out], s: f32[slots], bias: [out]. A row of slot -1 is
base, bit for bit, and one whose slot does not exist is NaN; without base, both are 0. If OF_ROWS, g
and s are those of the rows, f32[batch, out] and f32[batch]: a row is base where they are 1 and 0.

Traffic: 1 read and 1 write of batch·time·out; B once per program, up to its real rank, from the
level-2 cache after the first read. The programs' tokens are those of `bank_shrink`.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.bank_shrink import program_rows, rank_mask, row_slot
from dora_common.triton.jit import WIDEN, jit


@dataclasses.dataclass(frozen=True)
class Config:
    """A program computes a tile of ``columns`` for the tokens of a program of `bank_shrink`."""

    columns: int = 128
    warps: int = 4


def config(capability: int) -> Config:
    """Returns the config of a card; not measured on other cards than Hopper."""
    return Config(warps=4 if capability == 90 else 8)


@jit
def kernel(
    base_ptr,  # [batch, time, out], or None for the product alone
    z_ptr,  # f32[batch, time, ranks]
    b_ptr,  # [slots, ranks, out]
    g_ptr,  # f32[slots or batch, out], not read without base
    scale_ptr,  # f32[slots or batch], not read without base
    ids_ptr,  # [batch]
    groups_ptr,  # i32[programs, ROWS], not read unless GROUPED
    rank_ptr,  # i32[slots] or None, if every adapter has all ranks
    first_ptr,  # i32[], the slot that id 0 stands for, or None
    bias_ptr,  # [out], not read unless HAS_BIAS
    y_ptr,  # [batch, time, out]
    time,
    features,
    slots,
    RANKS: tl.constexpr,
    PADDED_RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OF_ROWS: tl.constexpr,  # also whether base is still without its bias
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPED: tl.constexpr,
    AT_END: tl.constexpr,
):
    row, index, row_mask = program_rows(groups_ptr, time, tl.program_id(0), ROWS, GROUPED)
    row_id, known, slot, rank = row_slot(ids_ptr, rank_ptr, first_ptr, row, slots, RANKS, AT_END)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    column_mask = column < features
    offset = index[:, None] * features + column[None, :]  # [ROWS, COLUMNS]
    mask = row_mask[:, None] & column_mask[None, :]
    stored, base, bias = 0.0, 0.0, 0.0
    if base_ptr is not None:
        # These loads come before the product, so that they run in parallel with it.
        stored = tl.load(base_ptr + offset, mask=mask, other=0.0)
        base = stored.to(tl.float32)
        bias = tl.zeros((1, COLUMNS), tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    lora = tl.zeros((ROWS, COLUMNS), tl.float32)
    if rank > 0:
        r = tl.arange(0, PADDED_RANKS)  # [PADDED_RANKS]
        z = tl.load(
            z_ptr + index[:, None] * RANKS + r[None, :],
            mask=row_mask[:, None] & rank_mask(r, rank, RANKS, AT_END)[None, :],
            other=0.0,
        ).to(b_ptr.dtype.element_ty)
        b = tl.load(
            b_ptr + (slot * RANKS + r[:, None]) * features + column[None, :],
            mask=rank_mask(r, rank, RANKS, AT_END)[:, None] & column_mask[None, :],
            other=0.0,
        )
        if WIDEN:
            z, b = z.to(tl.float32), b.to(tl.float32)
        lora = tl.dot(z, b, lora)
    if base_ptr is None:
        tl.store(y_ptr + offset, lora.to(y_ptr.dtype.element_ty), mask=mask)
    elif OF_ROWS:
        g = tl.load(g_ptr + row.to(tl.int64) * features + column, mask=column_mask, other=0.0)
        g = g.to(tl.float32)[None, :]
        scale = tl.load(scale_ptr + row + tl.arange(0, 1)).to(tl.float32)[:, None]  # [1, 1]
        # Selected, because base + 0·lora turns -0 into 0, and is NaN if lora is not finite.
        y = tl.where((g == 1) & (scale == 0), base, g * (base + scale * lora))
        if HAS_BIAS:
            y += bias
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        g = tl.load(g_ptr + slot * features + column, mask=column_mask, other=0.0)
        g = g.to(tl.float32)[None, :]
        scale = tl.load(scale_ptr + slot).to(tl.float32)
        y = g * ((base - bias) + scale * lora) + bias
        y = tl.where(known, y, float("nan")).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + offset, tl.where(row_id == -1, stored, y), mask=mask)
