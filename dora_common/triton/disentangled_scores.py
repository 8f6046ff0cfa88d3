"""What both passes of disentangled attention share: a tile of scores, and the mask of dropout.

    s_ij = (q_i·k_j + C_ij + P_ji)·scale        C_ij = q_i·K[c(i-j)], P_ji = k_j·Q[c(i-j)]

C and P, [time, pitch] of each head and text, are computed by `disentangled_pairs`. The pitch is the
time, rounded up so that each row is aligned.
"""

import dataclasses

import triton.language as tl

from dora_common.triton.jit import WIDEN, cdiv, jit

# Of keys that the mask leaves out: finite, so that a row without any key attends to all alike.
MASKED = tl.constexpr(-1e30)
LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Config:
    """A program has a tile of ``rows`` queries (or keys) and loops over the others, ``columns`` at
    a time."""

    rows: int = 64
    columns: int = 64
    warps: int = 4
    stages: int = 2


@jit
def product(a, b, total):
    """Returns total + a·b; operands of 16 bits are multiplied as they are."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@jit
def rows_of(base_ptr, first, features, TIME: tl.constexpr, STRIDE: tl.constexpr):
    """Returns x[first, features] of an array [time, heads, size] of one head, 0 outside."""
    offset = first[:, None] * STRIDE + features[None, :]
    return tl.load(base_ptr + offset, mask=(first < TIME)[:, None], other=0.0)


@jit
def square(base_ptr, row, column, TIME: tl.constexpr, PITCH: tl.constexpr):
    """Returns f32[row, column] of an array [time, pitch] of one head, 0 outside."""
    inside = (row < TIME)[:, None] & (column < TIME)[None, :]
    at = row[:, None] * PITCH + column[None, :]
    return tl.load(base_ptr + at, mask=inside, other=0.0).to(tl.float32)


@jit
def diagonals(a, n, ROWS: tl.constexpr, TIME: tl.constexpr, PITCH: tl.constexpr):
    """Returns the offsets [a, n] of the elements [a, a + n - (time - 1)] of an array [time, pitch]
    of one head, and which of them exist; ``a`` begins at a multiple of its size, ROWS."""
    b = a[:, None] + n[None, :] - (TIME - 1)
    # In 64 bits, the offsets of a thread's elements differ by constants that the compiler knows.
    at = a.to(tl.int64)[:, None] * (PITCH + 1) + n.to(tl.int64)[None, :] - (TIME - 1)
    inside = b.to(tl.uint32) < TIME
    if TIME % ROWS:
        inside &= (a < TIME)[:, None]
    return at, inside


@jit
def scores(q, k, c2p_ptr, p2c_ptr, pairs, i, j, TIME: tl.constexpr, PITCH: tl.constexpr):
    """Returns f32[i, j], the scores of a tile of queries and keys, without the scale."""
    # The product comes last, so that all that is computed from it has the layout of a product.
    if c2p_ptr is not None:
        s = square(c2p_ptr + pairs, i, j, TIME, PITCH)
        if p2c_ptr is not None:
            s += tl.trans(square(p2c_ptr + pairs, j, i, TIME, PITCH))
    elif p2c_ptr is not None:
        s = tl.trans(square(p2c_ptr + pairs, j, i, TIME, PITCH))
    else:
        s = tl.zeros((i.shape[0], j.shape[0]), tl.float32)
    return product(q, tl.trans(k), s)


@jit
def mix(x):
    """Returns the 32-bit finalizer of ``jax_dora.ops.dropout``."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def row_hash(seed_ptr, row):
    """Returns the hash of the numbers of rows, as ``jax_dora.ops.dropout.row_hash``."""
    low = tl.load(seed_ptr).to(tl.uint32, bitcast=True)
    high = tl.load(seed_ptr + 1).to(tl.uint32, bitcast=True)
    return mix(mix(row.to(tl.uint32) ^ low) ^ high)


@jit
def kept(hashed, column, THRESHOLD: tl.constexpr):
    """Returns which elements of rows with these hashes are kept, as
    ``jax_dora.ops.dropout.keep_mask``; both have the tile's shape, or one of 1."""
    pair = (((column >> 6) << 5) | (column & 31)).to(tl.uint32)
    shift = (((column >> 5) & 1) << 4).to(tl.uint32)
    return ((mix(hashed ^ pair) >> shift) & 0xFFFF) >= THRESHOLD


def pitch(time: int) -> int:
    """Returns the elements from one row of [time, time] to the next."""
    return cdiv(time, 16) * 16
