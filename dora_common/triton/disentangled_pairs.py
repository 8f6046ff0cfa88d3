"""The scores of relative positions of disentangled attention, for every pair of tokens.

    y[a, b] = x_a·table_{b - a}

For the queries, table_n is the embedding of the distance -n, and for the keys that of n. Each row
of the product with all distances is stored one element further than the row before it, so y is read
in tiles like any other array. The rows of a program are STEP apart, and each is stored STEP
elements further than the one before it, in vectors.

x: [batch, time, heads, size]; table: [2·time - 1, heads, size], for n from 1 - time on; y: [batch,
heads, time, pitch].

Traffic: one write of B·H·T². Flops: 2·B·H·T²·size, and those of the tiles that reach beyond the
distances of their rows. At B·H = 480, T = 512 and size 64 in bf16: 60 µs of traffic at 4.2 TB/s.
"""

import triton.language as tl

from dora_common.triton.disentangled_scores import STEP, diagonals, product, rows_of
from dora_common.triton.jit import jit


@jit
def kernel(
    x_ptr,  # [batch, time, heads, size]
    table_ptr,  # [2·time - 1, heads, size]
    y_ptr,  # [batch, heads, time, pitch]
    TIME: tl.constexpr,
    PITCH: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    text, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    STRIDE: tl.constexpr = HEADS * SIZE
    x_ptr += text.to(tl.int64) * TIME * STRIDE + head * SIZE
    y_ptr += tl.program_id(1).to(tl.int64) * TIME * PITCH
    table_ptr += head * SIZE
    lowest = tl.program_id(0) // STEP * (STEP * ROWS) + tl.program_id(0) % STEP
    r, features = tl.arange(0, ROWS), tl.arange(0, SIZE)
    x = rows_of(x_ptr, lowest + r * STEP, features, TIME, STRIDE)
    for first in range(0, TIME + STEP * (ROWS - 1), COLUMNS):
        m = first + tl.arange(0, COLUMNS)
        # The distances of the last row begin first: from 0 for 1 - time.
        n = m + (TIME - 1 - STEP * (ROWS - 1)) - lowest
        is_distance = (n >= 0) & (n < 2 * TIME - 1)
        row = table_ptr + n[:, None] * STRIDE + features[None, :]
        table = tl.load(row, mask=is_distance[:, None], other=0.0)
        y = product(x, tl.trans(table), tl.zeros((ROWS, COLUMNS), tl.float32))
        at, inside = diagonals(lowest, 1 - ROWS, r, m, TIME, PITCH)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
