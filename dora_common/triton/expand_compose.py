"""Expand and compose in one kernel: the adapter's second product, z Bᵀ, with compose as its
epilogue.

    lora     = z Bᵀ
    unbiased = base - bias                  (base if there is no bias)
    y        = base + ((g-1)·unbiased + g·(s·lora))       inner = unbiased + s·lora

With ``ADDS`` the change is added to what is in y already, as PEFT's dropout needs it.

z: [rows, r], lora_b B: [out, r], base, y, inner: [rows, out], all fp16 or all bf16; g: f32[out];
bias: [out]. lora stays in the fp32 accumulator and is never written to memory.

Traffic: 1 read and 1 write of rows·out (2 writes with inner); z and B are small and stay in L2.
Flops: 2·rows·out·r. At 4096×384×8192 in bf16: 32 µs of traffic at 4.2 TB/s and 32 µs of tensor
cores at 800 TFLOP/s, which overlap between the programs on a multiprocessor.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.jit import WIDEN, jit, next_power_of_2, number


@dataclasses.dataclass(frozen=True)
class Config:
    """A program computes a tile of ``rows`` × ``columns`` and loops over the rank, ``depth`` at a
    time.

    The tile of base is loaded before the products, and takes as many registers as a quarter to a
    half of the accumulator: higher tiles spill. A low rank has little arithmetic, and many small
    programs then keep more loads and stores in flight.
    """

    rows: int = 64
    columns: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 3


def config(rank: int, capability: int = 90) -> Config:
    """Returns the fastest config (H200, 4096 × 8192 at ranks 16, 64 and 384). On Blackwell, which
    was not measured, fewer warps at a high rank spill registers."""
    depth = min(64, max(16, next_power_of_2(rank)))
    if rank <= 16:
        return Config(rows=32, depth=depth, stages=2)
    if rank <= 128 or capability >= 100:
        return Config(depth=depth, warps=8, stages=2)
    return Config()


@jit
def kernel(
    base_ptr,  # [rows, out]
    z_ptr,  # [rows, r]
    lora_b_ptr,  # [out, r], or [r, out] if OUT_LAST
    g_ptr,  # [out]
    bias_ptr,  # [out], not read unless HAS_BIAS
    y_ptr,  # [rows, out], read if ADDS
    inner_ptr,  # [rows, out], not written unless WITH_INNER
    rows,
    features,
    scale,  # a number or its address
    RANK: tl.constexpr,
    OUT_LAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS_BIAS: tl.constexpr,  # whether base is still without its bias
    ADDS: tl.constexpr,  # whether the change is added to what is in y, and not to base
    WITH_INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row_tiles = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    row = (program % row_tiles) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = (program // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    row_mask, column_mask = row < rows, column < features
    inside = tl.arange(0, DEPTH)  # [DEPTH]
    z_ptrs = z_ptr + row.to(tl.int64)[:, None] * RANK + inside[None, :]
    if OUT_LAST:
        b_step = features
        b_ptrs = lora_b_ptr + column[None, :] + inside.to(tl.int64)[:, None] * features
    else:
        b_step = 1
        b_ptrs = lora_b_ptr + column.to(tl.int64)[None, :] * RANK + inside[:, None]
    mask = row_mask[:, None] & column_mask[None, :]
    # rows·out may exceed 2³¹.
    offset = row.to(tl.int64)[:, None] * features + column[None, :]  # [ROWS, COLUMNS]
    # This load comes before the products, so that it runs in parallel with them.
    base = tl.load(base_ptr + offset, mask=mask, other=0.0)
    lora = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, RANK, DEPTH):
        left = inside < RANK - first
        z = tl.load(z_ptrs + first, mask=row_mask[:, None] & left[None, :], other=0.0)
        b = tl.load(b_ptrs + first * b_step, mask=left[:, None] & column_mask[None, :], other=0.0)
        if WIDEN:
            z, b = z.to(tl.float32), b.to(tl.float32)
        lora = tl.dot(z, b, lora)

    g = tl.load(g_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    base = base.to(tl.float32)
    unbiased = base
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if ADDS_BIAS:
            base += bias
        else:
            unbiased -= bias
    scaled = number(scale) * lora
    y = (g - 1.0) * unbiased + g * scaled
    if ADDS:
        y += tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    else:
        y += base
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
    if WITH_INNER:
        inner = unbiased + scaled
        tl.store(inner_ptr + offset, inner.to(inner_ptr.dtype.element_ty), mask=mask)
