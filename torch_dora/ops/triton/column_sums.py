"""The second stage of a reduction over rows: partial sums to their sum, column by column.

partial: f32[parts, features]; result: f32[features], the sums or their square roots. They are added
in their order and without atomics, so that the same inputs give the same bits run after run.
"""

import dataclasses

import triton.language as tl
from torch import Tensor

from torch_dora.ops.triton.jit import cdiv, jit, next_power_of_2


@dataclasses.dataclass(frozen=True)
class SumConfig:
    """A program adds up as many columns as ``elements`` partials are, at once.

    32 of them to a thread; at least 8 columns, the 32 bytes that memory gives at a time.
    """

    elements: int = 4096
    warps: int = 4


CONFIG = SumConfig()


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


def launch(partial: Tensor, result: Tensor, *, root: bool, config: SumConfig = CONFIG) -> None:
    """Fills ``result``, with square roots if ``root``."""
    parts, features = partial.shape
    padded = next_power_of_2(parts)
    columns = max(8, config.elements // padded)
    _kernel[(cdiv(features, columns),)](
        partial,
        result,
        parts,
        features,
        ROOT=root,
        PARTS=padded,
        COLUMNS=columns,
        num_warps=config.warps,
        enable_fp_fusion=True,
    )
