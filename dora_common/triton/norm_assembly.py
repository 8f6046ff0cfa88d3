"""Norm assembly: computes the norm from three sums per output feature, in one small launch.

    norm = √max(base_sq + 2s·cross + s²·ba_sq, 0)

base_sq, cross, ba_sq, norm: f32[out]. The result equals torch's evaluation of this formula bit for
bit: no multiplication is contracted into an FMA, the square root is IEEE's, and max keeps a NaN.

Traffic: 16·out bytes. One launch replaces six.
"""

import triton.language as tl

from dora_common.triton.jit import jit

# The features of one program: few, since out is a few thousand and the launch dominates the cost.
COLUMNS, WARPS = 256, 4


@jit
def kernel(
    base_sq_ptr, cross_ptr, ba_sq_ptr, norm_ptr, features, twice, square, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    column_mask = column < features
    base_sq = tl.load(base_sq_ptr + column, mask=column_mask, other=0.0)
    cross = tl.load(cross_ptr + column, mask=column_mask, other=0.0)
    ba_sq = tl.load(ba_sq_ptr + column, mask=column_mask, other=0.0)
    total = base_sq + twice * cross + square * ba_sq
    total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(norm_ptr + column, tl.sqrt_rn(total), mask=column_mask)
