"""The second stage of a reduction over rows: adds up partial sums, column by column.

partial: f32[parts, features]; result: f32[features]. The partial sums are added in a fixed order
and without atomics, so the same inputs always give the same bits. What is done with a sum Σ:

    "sum"     Σ
    "root"    √Σ, a norm
    "scale"   f32[2, features]: max(√Σ, eps), and factor divided by it, which is g for a magnitude
    "divide"  Σ / factor, the magnitude's gradient for the first of these two
"""

import triton.language as tl

from dora_common.triton.jit import jit

# ELEMENTS: the partial sums that a program loads, 32 per thread. MIN_COLUMNS: 8 columns are 32
# bytes, the smallest memory transaction.
ELEMENTS, MIN_COLUMNS, WARPS = 4096, 8, 4


@jit
def kernel(
    partial_ptr,  # f32[parts, features]
    factor_ptr,  # [features], for "scale" and "divide"
    result_ptr,  # f32[features], or f32[2, features] for "scale"
    parts,
    features,
    eps,
    THEN: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    column_mask = column < features
    part = tl.arange(0, PARTS)  # [PARTS]
    mask = (part < parts)[:, None] & column_mask[None, :]
    offset = part.to(tl.int64)[:, None] * features + column[None, :]  # [PARTS, COLUMNS]
    total = tl.sum(tl.load(partial_ptr + offset, mask=mask, other=0.0), axis=0)
    if THEN == "root" or THEN == "scale":
        total = tl.sqrt_rn(total)
    if THEN == "scale" or THEN == "divide":
        factor = tl.load(factor_ptr + column, mask=column_mask, other=1.0).to(tl.float32)
        if THEN == "divide":
            total = tl.div_rn(total, factor)
        else:
            total = tl.maximum(total, eps, propagate_nan=tl.PropagateNan.ALL)
            g = tl.div_rn(factor, total)
            tl.store(result_ptr + features + column, g, mask=column_mask)
    tl.store(result_ptr + column, total, mask=column_mask)
