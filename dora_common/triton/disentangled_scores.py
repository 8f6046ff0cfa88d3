"""What both passes of disentangled attention share: a tile of scores, and the mask of dropout.

    s_ij = (q_i·k_j + C[i, c(i-j)] + P[j, c(i-j)])·scale        C = q Kᵀ, P = k Qᵀ

C and P, [batch·time, buckets] of each head, are products with the embeddings of the buckets. The
scores of a tile are in few columns of theirs next to one another, which the cache holds: nothing of
[time, time] is gathered in memory.
"""

import dataclasses
from typing import Any

import triton.language as tl

from dora_common.triton.jit import WIDEN, jit

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
def positions(product_ptr, bucket_ptr, own, other, SIGN: tl.constexpr, TIME: tl.constexpr,
              BUCKETS: tl.constexpr):  # fmt: skip
    """Returns f32[own, other], the elements [own, c(sign·(own - other))] of C or P of one head."""
    inside = (own < TIME)[:, None] & (other < TIME)[None, :]
    distance = SIGN * (own[:, None] - other[None, :])
    bucket = tl.load(bucket_ptr + distance + (TIME - 1), mask=inside, other=0)
    at = own[:, None] * BUCKETS + bucket
    return tl.load(product_ptr + at, mask=inside, other=0.0).to(tl.float32)


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


def constants(time: int, heads: int, size: int, buckets: int, scale: float) -> dict[str, Any]:
    """Returns the constants that all kernels of the attention take."""
    return {"TIME": time, "HEADS": heads, "SIZE": size, "BUCKETS": buckets, "SCALE": scale}
