"""Multiplies each row by the B of its slot and computes the result, in one pass over the result.

    y = g[slot]∘(base + s[slot]·z B[slot]) + bias, where base is without its bias

base, y: [batch, time, out] and B: [slots, ranks, out], all fp16 or bf16; z: f32[batch, time,
ranks], rounded to B's dtype; g: f32[slots, out], s: f32[slots], bias: [out]. A row of slot -1 is
base, bit for bit. A row whose slot does not exist is NaN.

Traffic: 1 read and 1 write of batch·time·out; B once per program, up to its real rank, from the
level-2 cache after the first read. The programs' tokens are those of `bank_shrink`.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.bank_shrink import program_rows
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
    base_ptr,  # [batch, time, out]
    z_ptr,  # f32[batch, time, ranks]
    b_ptr,  # [slots, ranks, out]
    g_ptr,  # f32[slots, out]
    scale_ptr,  # f32[slots]
    ids_ptr,  # i64[batch]
    groups_ptr,  # i32[programs, ROWS], not read unless GROUPED
    rank_ptr,  # i32[slots]
    bias_ptr,  # [out], not read unless HAS_BIAS
    y_ptr,  # [batch, time, out]
    time,
    features,
    slots,
    RANKS: tl.constexpr,
    PADDED_RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPED: tl.constexpr,
):
    row, index, row_mask = program_rows(groups_ptr, time, tl.program_id(0), ROWS, GROUPED)
    row_id = tl.load(ids_ptr + row)
    known = (row_id >= 0) & (row_id < slots)
    slot = tl.where(known, row_id, 0).to(tl.int64)
    rank = tl.where(known, tl.load(rank_ptr + slot), 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    column_mask = column < features
    offset = index[:, None] * features + column[None, :]  # [ROWS, COLUMNS]
    mask = row_mask[:, None] & column_mask[None, :]
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
            mask=row_mask[:, None] & (r < rank)[None, :],
            other=0.0,
        ).to(b_ptr.dtype.element_ty)
        b = tl.load(
            b_ptr + (slot * RANKS + r[:, None]) * features + column[None, :],
            mask=(r < rank)[:, None] & column_mask[None, :],
            other=0.0,
        )
        if WIDEN:
            z, b = z.to(tl.float32), b.to(tl.float32)
        lora = tl.dot(z, b, lora)
    g = tl.load(g_ptr + slot * features + column, mask=column_mask, other=0.0)
    g = g.to(tl.float32)[None, :]
    scale = tl.load(scale_ptr + slot).to(tl.float32)
    y = g * ((base - bias) + scale * lora) + bias
    y = tl.where(known, y, float("nan")).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offset, tl.where(row_id == -1, stored, y), mask=mask)
