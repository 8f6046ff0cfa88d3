"""What both passes of a layer norm of a residual sum share: a tile of rows, and their statistics.

    t = drop(y) + x        n = (t - mean(t)) / sqrt(var(t) + epsilon)

Both passes compute this from y and x, so that nothing is stored between them.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.dropout_mask import kept, row_hash
from dora_common.triton.jit import jit


@dataclasses.dataclass(frozen=True)
class Config:
    """A program has ``rows`` rows at a time. In the backward pass, ``programs`` share all rows."""

    rows: int = 1
    warps: int = 4
    programs: int = 1


@jit
def normalised(
    y_ptr,
    x_ptr,
    seed_ptr,
    row,
    column,
    COUNT: tl.constexpr,
    FEATURES: tl.constexpr,
    EPSILON: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Returns (n, 1 / sqrt(var + epsilon), which elements of y are kept, offsets, mask) of a tile
    of rows of [COUNT, FEATURES]; n is f32[row, column]."""
    inside = (row < COUNT)[:, None] & (column < FEATURES)[None, :]
    at = row.to(tl.int64)[:, None] * FEATURES + column[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    is_kept = inside
    if seed_ptr is not None:
        is_kept = kept(row_hash(seed_ptr, row)[:, None], column[None, :], THRESHOLD)
        y = tl.where(is_kept, y * (1 / KEPT), 0.0)
    t = y + tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    centred = t - (tl.sum(t, 1) / FEATURES)[:, None]
    if FEATURES != column.shape[0]:
        centred = tl.where((column < FEATURES)[None, :], centred, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / FEATURES + EPSILON)
    return centred * inverse[:, None], inverse, is_kept, at, inside
