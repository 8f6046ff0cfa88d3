"""The gradient of the embeddings of distances, summed over the texts of a batch.

    dtable_n = Σ_text Σ_a d[a, a + n] x_a

For the embeddings that the queries are multiplied by, d is ds, x is q, and n the negative distance;
for the others, d is dsᵀ, x is k, and n the distance. The elements [a, a + n] of d have the strides
(pitch + 1, 1). Each of ``parts`` programs of a head and of a tile of distances has a part of the
texts.

d: [batch, heads, time, pitch]; x: [batch, time, heads, size]; dtable: f32[parts, 2·time - 1, heads,
size], for n from 1 - time on.

Traffic: d once. Flops: 2·B·H·T²·size, and those of the tiles that reach beyond a row.
"""

import triton.language as tl

from dora_common.triton.disentangled_scores import product, rows_of
from dora_common.triton.jit import bound, jit


@jit
def kernel(
    d_ptr,  # [batch, heads, time, pitch]
    x_ptr,  # [batch, time, heads, size]
    table_ptr,  # f32[parts, 2·time - 1, heads, size]
    BATCH: tl.constexpr,
    TIME: tl.constexpr,
    PITCH: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,  # distances
    COLUMNS: tl.constexpr,  # rows of x
):
    head, part = tl.program_id(1) % HEADS, tl.program_id(1) // HEADS
    STRIDE: tl.constexpr = HEADS * SIZE
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # from 0 for the distance 1 - time
    features = tl.arange(0, SIZE)
    # The rows that have a distance of the tile.
    lowest = tl.maximum(TIME - 1 - (tl.program_id(0) * ROWS + ROWS - 1), 0) // COLUMNS * COLUMNS
    highest = tl.minimum(2 * TIME - 1 - tl.program_id(0) * ROWS, TIME)
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for text in range(bound(part), BATCH, PARTS):
        square = (text * HEADS + head).to(tl.int64) * TIME * PITCH
        base = tl.cast(text, tl.int64) * TIME * STRIDE + head * SIZE
        for first in range(bound(lowest), bound(highest), COLUMNS):
            a = first + tl.arange(0, COLUMNS)
            # In 64 bits, the offsets of a thread's elements differ by constants that the compiler
            # knows. Rows that are 4 apart, whose elements are read in vectors, take longer here.
            at = a.to(tl.int64)[:, None] * (PITCH + 1) + n.to(tl.int64)[None, :] - (TIME - 1)
            inside = (a[:, None] + n[None, :] - (TIME - 1)).to(tl.uint32) < TIME
            if TIME % COLUMNS:
                inside &= (a < TIME)[:, None]
            d = tl.load(d_ptr + square + at, mask=inside, other=0.0)
            x = rows_of(x_ptr + base, a, features, TIME, STRIDE)
            total = product(tl.trans(d), x, total)
    at = table_ptr + (part * (2 * TIME - 1) * STRIDE + head * SIZE)
    at += n[:, None] * STRIDE + features[None, :]
    tl.store(at, total, mask=(n < 2 * TIME - 1)[:, None])
