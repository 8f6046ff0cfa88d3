"""Compose forward: y or ΔY in one pass, and also inner if g requires a gradient.

    unbiased = base - bias                  (base if there is no bias)
    change   = (g-1)·unbiased + g·(s·lora)
    y        = base + change       or ΔY = change        inner = unbiased + s·lora

base, lora, y, inner: [rows, out], fp16, bf16 or fp32; g: f32[out]; bias: [out]. All arithmetic is
in fp32, and every store rounds once.

With ``ADDS`` the change is added to the result that is there already, as PEFT's dropout needs it.

Traffic: 2 reads and 1 write of rows·out (2 writes with inner); at 4.2 TB/s and bf16, 48 µs for
4096×8192. With about 6 flops an element, the kernel is bound by memory at every size.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.jit import jit, number


@dataclasses.dataclass(frozen=True)
class Config:
    """A program computes a tile of ``rows`` × ``columns`` elements.

    The rows of a tile share one load of g. With 4096 elements in a tile, each of 128 threads has
    four 16-byte loads of either operand in flight, which is enough to hide the memory latency.
    """

    rows: int = 4
    columns: int = 1024
    warps: int = 4


CONFIG = Config()


@jit
def kernel(
    base_ptr,  # [rows, out]
    lora_ptr,  # [rows, out]
    g_ptr,  # [out]
    bias_ptr,  # [out], not read unless HAS_BIAS
    result_ptr,  # [rows, out], read if ADDS
    inner_ptr,  # [rows, out], not written unless WITH_INNER
    rows,
    features,
    scale,  # a number or its address
    DELTA: tl.constexpr,
    ADDS: tl.constexpr,  # whether y or ΔY is added to what is in result
    HAS_BIAS: tl.constexpr,
    ADDS_BIAS: tl.constexpr,  # whether base is still without its bias
    WITH_INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column_tiles = tl.cdiv(features, COLUMNS)
    program = tl.program_id(0)
    row = (program // column_tiles) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = (program % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    column_mask = column < features
    mask = (row < rows)[:, None] & column_mask[None, :]
    # rows·out may exceed 2³¹.
    offset = row.to(tl.int64)[:, None] * features + column[None, :]  # [ROWS, COLUMNS]

    g = tl.load(g_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    base = tl.load(base_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    lora = tl.load(lora_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    unbiased = base
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if ADDS_BIAS:
            base += bias
        else:
            unbiased -= bias
    scaled = number(scale) * lora
    result = (g - 1.0) * unbiased + g * scaled
    if not DELTA:
        result = base + result
    if ADDS:
        result += tl.load(result_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(result_ptr + offset, result.to(result_ptr.dtype.element_ty), mask=mask)
    if WITH_INNER:
        inner = unbiased + scaled
        tl.store(inner_ptr + offset, inner.to(inner_ptr.dtype.element_ty), mask=mask)
