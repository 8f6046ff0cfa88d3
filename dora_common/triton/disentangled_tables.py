"""The gradient of the embeddings of distances, summed over the texts of a batch.

    dtable_n = Σ_text Σ_a d[a, a + n] x_a

For the embeddings that the queries are multiplied by, d is ds, x is q, and n the negative distance;
for the others, d is dsᵀ, x is k, and n the distance. The elements [a, a + n] of d have the strides
(pitch + 1, 1). Each of STEP programs of a head and of a tile of distances has every STEP-th row of
all texts, so that it reads vectors.

d: [batch, heads, time, pitch]; x: [batch, time, heads, size]; dtable: f32[STEP, 2·time - 1, heads,
size], for n from 1 - time on.

Traffic: d once. Flops: 2·B·H·T²·size, and those of the tiles that reach beyond a row.
"""

import triton.language as tl

from dora_common.triton.disentangled_scores import STEP, diagonals, product, rows_of
from dora_common.triton.jit import bound, jit


@jit
def kernel(
    d_ptr,  # [batch, heads, time, pitch]
    x_ptr,  # [batch, time, heads, size]
    table_ptr,  # f32[STEP, 2·time - 1, heads, size]
    BATCH: tl.constexpr,
    TIME: tl.constexpr,
    PITCH: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # distances
    COLUMNS: tl.constexpr,  # rows of x
):
    head, part = tl.program_id(1) % HEADS, tl.program_id(1) // HEADS
    STRIDE: tl.constexpr = HEADS * SIZE
    m, r = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    features = tl.arange(0, SIZE)
    # From 0 for the distance 1 - time; row a has the distance n at a + n - (time - 1), which is a
    # multiple of STEP for the first one and the rows of this part.
    n = tl.program_id(0) * ROWS - (part + (STEP * TIME - (TIME - 1))) % STEP
    # The rows that have a distance of the tile.
    begin = tl.maximum(TIME - n - ROWS, 0) // STEP * STEP + part
    end = tl.minimum(2 * TIME - 1 - n, TIME)
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for text in range(0, BATCH):
        square = (text * HEADS + head).to(tl.int64) * TIME * PITCH
        base = tl.cast(text, tl.int64) * TIME * STRIDE + head * SIZE
        for lowest in range(bound(begin), bound(end), STEP * COLUMNS):
            x = rows_of(x_ptr + base, lowest + r * STEP, features, TIME, STRIDE)
            start = (lowest + n - (TIME - 1)) // STEP
            at, inside = diagonals(lowest, start, r, m, TIME, PITCH)
            d = tl.load(d_ptr + square + at, mask=inside, other=0.0)
            total = product(tl.trans(d), x, total)
    n += m
    at = table_ptr + (part * (2 * TIME - 1) * STRIDE + head * SIZE)
    at += n[:, None] * STRIDE + features[None, :]
    tl.store(at, total, mask=((n >= 0) & (n < 2 * TIME - 1))[:, None])
