"""What both passes of disentangled attention share: a tile of scores.

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
# The rows of a program that reads or writes along diagonals are this far apart: then all of their
# diagonals begin at a multiple of it, and are read in vectors, though neighbouring rows' are not.
STEP = tl.constexpr(4)


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
def diagonals(lowest, start, r, m, TIME: tl.constexpr, PITCH: tl.constexpr):
    """Returns the offsets [r, m] of the elements [a, b] of an array [time, pitch] of one head, and
    which of them exist, for rows a = lowest + STEP·r and b = STEP·(start + r) + m."""
    b = ((start + r) * STEP)[:, None] + m[None, :]
    # As a sum of multiples of STEP and of the numbers from 0 on, of which Triton makes vectors.
    at = lowest * PITCH + ((r * (PITCH + 1) + start) * STEP)[:, None] + m[None, :]
    return at, (lowest + r * STEP < TIME)[:, None] & (b >= 0) & (b < TIME)


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


def programs(time: int, rows: int) -> int:
    """Returns the number of programs that have ``rows`` rows each, STEP apart."""
    return cdiv(time, rows * STEP.value) * STEP.value


def pitch(time: int) -> int:
    """Returns the elements from one row of [time, time] to the next."""
    return cdiv(time, 16) * 16
