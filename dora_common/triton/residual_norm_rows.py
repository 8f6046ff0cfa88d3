"""What both passes of a layer norm of a residual sum share: a tile of rows, and their statistics.

    t = drop(y) + x        n = (t - mean(t)) / sqrt(var(t) + epsilon)

Both passes compute t from y and x. The forward pass stores the mean and 1 / sqrt(var(t) + epsilon)
of each row for the backward pass, which would wait twice for sums over a row to compute them again.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.dropout_mask import kept, row_hash
from dora_common.triton.jit import jit


@dataclasses.dataclass(frozen=True)
class Config:
    """A program has ``rows`` rows at a time. In the backward pass, ``programs`` share all rows, and
    have ``stages`` tiles of rows in flight."""

    rows: int = 1
    warps: int = 4
    programs: int = 1
    stages: int = 1


@jit
def summed(
    y_ptr,
    x_ptr,
    seed_ptr,
    row,
    column,
    COUNT: tl.constexpr,
    FEATURES: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Returns (t, which elements of y are kept, offsets, mask) of a tile of rows of
    [COUNT, FEATURES]; t is f32[row, column]."""
    inside = (row < COUNT)[:, None] & (column < FEATURES)[None, :]
    at = row.to(tl.int64)[:, None] * FEATURES + column[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    is_kept = inside
    if seed_ptr is not None:
        is_kept = kept(row_hash(seed_ptr, row)[:, None], column[None, :], THRESHOLD)
        y = tl.where(is_kept, y * (1 / KEPT), 0.0)
    t = y + tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return t, is_kept, at, inside
