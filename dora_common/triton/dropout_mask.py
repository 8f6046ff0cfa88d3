"""The mask of dropout, computed from a counter as in ``jax_dora.ops.dropout``."""

import triton.language as tl

from dora_common.triton.jit import jit


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
