"""The second stage of a reduction over rows: adds up partial sums, column by column.

partial: f32[parts, features]; result: f32[features], the sums or their square roots. The partial
sums are added in a fixed order and without atomics, so the same inputs always give the same bits.
"""

import torch
import triton.language as tl
from torch import Tensor

from torch_dora.ops.triton.jit import cdiv, jit, next_power_of_2

# ELEMENTS: the partial sums that a program loads, 32 per thread. MIN_COLUMNS: 8 columns are 32
# bytes, the smallest memory transaction.
ELEMENTS, MIN_COLUMNS, WARPS = 4096, 8, 4


@jit
def _kernel(
    partial_ptr,  # f32[parts, features]
    result_ptr,  # f32[features]
    parts,
    features,
    ROOT: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    column_mask = column < features
    part = tl.arange(0, PARTS)  # [PARTS]
    mask = (part < parts)[:, None] & column_mask[None, :]
    offset = part.to(tl.int64)[:, None] * features + column[None, :]  # [PARTS, COLUMNS]
    total = tl.sum(tl.load(partial_ptr + offset, mask=mask, other=0.0), axis=0)
    if ROOT:
        total = tl.sqrt_rn(total)
    tl.store(result_ptr + column, total, mask=column_mask)


def launch(partial: Tensor, *, root: bool) -> Tensor:
    """Returns the sums over the parts, or with ``root`` their square roots."""
    parts, features = partial.shape
    result = torch.empty(features, device=partial.device, dtype=torch.float32)
    padded = next_power_of_2(parts)
    columns = max(MIN_COLUMNS, ELEMENTS // padded)
    _kernel[(cdiv(features, columns),)](
        partial,
        result,
        parts,
        features,
        ROOT=root,
        PARTS=padded,
        COLUMNS=columns,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return result
