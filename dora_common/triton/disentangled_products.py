"""The gradient of the queries, or of the keys, of disentangled attention.

    dx_a = Σ_b d[a, b] other_b + Σ_n d[a, a + n] table_n

For the queries, d is ds, other is k, and table_n the embedding of the distance -n; for the keys, d
is dsᵀ, other is q, and table_n that of the distance n. The elements [a, a + n] of d have the
strides (pitch + 1, 1), so a tile of them is read like any other.

d: [batch, heads, time, pitch]; other, dx: [batch, time, heads, size]; table: [2·time - 1, heads,
size], for n from 1 - time on.

Traffic: d once, from the second sum on from the L2 cache. Flops: 4·B·H·T²·size, and those of the
tiles that reach beyond the distances of their rows.
"""

import triton.language as tl

from dora_common.triton.disentangled_scores import diagonals, product, rows_of
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
    a = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    features = tl.arange(0, SIZE)
    dx = tl.zeros((ROWS, SIZE), tl.float32)
    for first in range(0, TIME, COLUMNS):
        b = first + tl.arange(0, COLUMNS)
        inside = (a < TIME)[:, None] & (b < TIME)[None, :]
        d = tl.load(d_ptr + a[:, None] * PITCH + b[None, :], mask=inside, other=0.0)
        dx = product(d, rows_of(other_ptr + base, b, features, TIME, STRIDE), dx)
    if table_ptr is not None:
        # The distances of the last row begin first.
        start = (TIME - ROWS) - tl.program_id(0) * ROWS
        n = start + tl.arange(0, COLUMNS)  # from 0 for the distance 1 - time
        at, inside = diagonals(a, n, ROWS, TIME, PITCH)
        d = tl.load(d_ptr + at, mask=inside, other=0.0)
        for first in range(0, TIME + ROWS - 1, COLUMNS):
            n = start + first + tl.arange(0, COLUMNS)
            # Elements of 2 bytes cannot be copied while others are multiplied, only loaded.
            at, inside = diagonals(a, n + COLUMNS, ROWS, TIME, PITCH)
            next_d = tl.load(d_ptr + at, mask=inside, other=0.0)
            row = table_ptr + head * SIZE + n[:, None] * STRIDE + features[None, :]
            is_distance = (n >= 0) & (n < 2 * TIME - 1)
            dx = product(d, tl.load(row, mask=is_distance[:, None], other=0.0), dx)
            d = next_d
    offset = a[:, None] * STRIDE + features[None, :]
    tl.store(dx_ptr + base + offset, dx.to(dx_ptr.dtype.element_ty), mask=(a < TIME)[:, None])
