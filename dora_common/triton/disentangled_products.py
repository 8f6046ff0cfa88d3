"""The gradient of the queries, or of the keys, of disentangled attention.

    dx_a = Σ_b d[a, b] other_b + Σ_n d[a, a + n] table_n

For the queries, d is ds, other is k, and table_n the embedding of the distance -n; for the keys, d
is dsᵀ, other is q, and table_n that of the distance n. The elements [a, a + n] of d have the
strides (pitch + 1, 1), so a tile of them is read like any other: in vectors, since the rows of a
program are STEP apart.

d: [batch, heads, time, pitch]; other, dx: [batch, time, heads, size]; table: [2·time - 1, heads,
size], for n from 1 - time on.

Traffic: d once, from the second sum on from the L2 cache. Flops: 4·B·H·T²·size, and those of the
tiles that reach beyond the distances of their rows.
"""

import triton.language as tl

from dora_common.triton.disentangled_scores import STEP, diagonals, product, rows_of
from dora_common.triton.jit import jit


@jit
def kernel(
    d_ptr,  # [batch, heads, time, pitch]
    other_ptr,  # [batch, time, heads, size]
    table_ptr,  # [2·time - 1, heads, size] or None
    dx_ptr,  # [batch, time, heads, size]
    TIME: tl.constexpr,
    PITCH: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    text, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    STRIDE: tl.constexpr = HEADS * SIZE
    base = text.to(tl.int64) * TIME * STRIDE + head * SIZE
    d_ptr += tl.program_id(1).to(tl.int64) * TIME * PITCH
    lowest = tl.program_id(0) // STEP * (STEP * ROWS) + tl.program_id(0) % STEP
    r, features = tl.arange(0, ROWS), tl.arange(0, SIZE)
    a = lowest + r * STEP
    dx = tl.zeros((ROWS, SIZE), tl.float32)
    for first in range(0, TIME, COLUMNS):
        b = first + tl.arange(0, COLUMNS)
        inside = (a < TIME)[:, None] & (b < TIME)[None, :]
        d = tl.load(d_ptr + a[:, None] * PITCH + b[None, :], mask=inside, other=0.0)
        dx = product(d, rows_of(other_ptr + base, b, features, TIME, STRIDE), dx)
    if table_ptr is not None:
        for first in range(0, TIME + STEP * (ROWS - 1), COLUMNS):
            m = first + tl.arange(0, COLUMNS)
            # The distances of the last row begin first: from 0 for 1 - time.
            n = m + (TIME - 1 - STEP * (ROWS - 1)) - lowest
            is_distance = (n >= 0) & (n < 2 * TIME - 1)
            row = table_ptr + head * SIZE + n[:, None] * STRIDE + features[None, :]
            table = tl.load(row, mask=is_distance[:, None], other=0.0)
            at, inside = diagonals(lowest, 1 - ROWS, r, m, TIME, PITCH)
            dx = product(tl.load(d_ptr + at, mask=inside, other=0.0), table, dx)
    offset = a[:, None] * STRIDE + features[None, :]
    tl.store(dx_ptr + base + offset, dx.to(dx_ptr.dtype.element_ty), mask=(a < TIME)[:, None])
