"""The second stage of a reduction over rows: partial sums to their sum, column by column.

partial: f32[parts, features]; result: f32[features], the sums or their square roots. They are added
in their order and without atomics, so that the same inputs give the same bits run after run.
"""

import torch
import triton.language as tl
from torch import Tensor

from torch_dora.ops.triton.jit import cdiv, jit, next_power_of_2

# Partials that a program adds up at once, 32 to a thread; at least 8 columns, the 32 bytes that
# memory gives at a time.
ELEMENTS, LEAST_COLUMNS, WARPS = 4096, 8, 4


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
    here = column < features
    part = tl.arange(0, PARTS)  # [PARTS]
    mask = (part < parts)[:, None] & here[None, :]
    offset = part.to(tl.int64)[:, None] * features + column[None, :]  # [PARTS, COLUMNS]
    total = tl.sum(tl.load(partial_ptr + offset, mask=mask, other=0.0), axis=0)
    if ROOT:
        total = tl.sqrt_rn(total)
    tl.store(result_ptr + column, total, mask=here)


def launch(partial: Tensor, *, root: bool) -> Tensor:
    """Returns the sums, or their square roots if ``root``."""
    parts, features = partial.shape
    result = torch.empty(features, device=partial.device, dtype=torch.float32)
    padded = next_power_of_2(parts)
    columns = max(LEAST_COLUMNS, ELEMENTS // padded)
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
