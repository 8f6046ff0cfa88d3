"""The gradient of disentangled attention's scores and values.

    p = 2^(s·log₂e - lse)      dv = (p∘m / kept)ᵀ do      ds = scale·p∘((do vᵀ)∘m / kept - delta)

with s and m as in the forward pass, which are computed again, and delta_i = do_i·o_i. A program has
a tile of keys and loops over the queries. ds and its transpose are stored, [batch, heads, time,
pitch] in the operands' dtype: along a row, the one has all distances of a query, and the other
those of a key, as strides (`disentangled_products`, `disentangled_tables`).

Traffic: C and P once, 2·B·H·T², and two writes of B·H·T². Flops: 6·B·H·T²·size.
"""

import triton.language as tl

from dora_common.triton.disentangled_scores import (
    LOG2E,
    MASKED,
    product,
    rows_of,
    scores,
)
from dora_common.triton.dropout_mask import kept, row_hash
from dora_common.triton.jit import jit

_LOG2E = tl.constexpr(LOG2E)


@jit
def kernel(
    q_ptr,  # [batch, time, heads, size]
    k_ptr,  # [batch, time, heads, size]
    v_ptr,  # [batch, time, heads, size]
    do_ptr,  # [batch, time, heads, size]
    c2p_ptr,  # [batch, heads, time, pitch] or None, of queries and keys
    p2c_ptr,  # [batch, heads, time, pitch] or None, of keys and queries
    mask_ptr,  # i8[batch, time] or None
    seed_ptr,  # i32[2] or None
    lse_ptr,  # f32[batch, heads, time]
    delta_ptr,  # f32[batch, time, heads]
    dv_ptr,  # [batch, time, heads, size]
    ds_ptr,  # [batch, heads, time, pitch]
    ds_back_ptr,  # [batch, heads, time, pitch], its transpose
    TIME: tl.constexpr,
    PITCH: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,  # keys
    COLUMNS: tl.constexpr,  # queries
):
    text, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    STRIDE: tl.constexpr = HEADS * SIZE
    base = text.to(tl.int64) * TIME * STRIDE + head * SIZE
    pairs = tl.program_id(1).to(tl.int64) * TIME * PITCH
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    features = tl.arange(0, SIZE)
    k = rows_of(k_ptr + base, j, features, TIME, STRIDE)
    v = rows_of(v_ptr + base, j, features, TIME, STRIDE)
    is_key = j < TIME
    if mask_ptr is not None:
        is_key = tl.load(mask_ptr + text * TIME + j, mask=is_key, other=0) != 0
    dv = tl.zeros((ROWS, SIZE), tl.float32)
    for first in range(0, TIME, COLUMNS):
        i = first + tl.arange(0, COLUMNS)
        q = rows_of(q_ptr + base, i, features, TIME, STRIDE)
        s = scores(q, k, c2p_ptr, p2c_ptr, pairs, i, j, TIME, PITCH)
        lse = tl.load(lse_ptr + tl.program_id(1) * TIME + i, mask=i < TIME, other=float("inf"))
        # Of a row without any key, lse does not tell the number of tokens: it is lost in rounding.
        has_key = lse > MASKED / 2
        s = tl.where(is_key[None, :], s * (SCALE * _LOG2E), MASKED)
        p = tl.exp2(s - lse[:, None]) * tl.where(has_key, 1.0, 1.0 / TIME)[:, None]
        do = rows_of(do_ptr + base, i, features, TIME, STRIDE)
        dp = product(do, tl.trans(v), tl.zeros((COLUMNS, ROWS), tl.float32))
        dropped = p
        if seed_ptr is not None:
            hashed = row_hash(seed_ptr, tl.program_id(1) * TIME + i)[:, None]
            is_kept = kept(hashed, j[None, :], THRESHOLD)
            dropped = tl.where(is_kept, p, 0.0)
            dp = tl.where(is_kept, dp, 0.0)
        dv = product(tl.trans(dropped.to(do.dtype)), do, dv)
        delta = tl.load(delta_ptr + (text * TIME + i) * HEADS + head, mask=i < TIME, other=0.0)
        factor = tl.where(has_key, SCALE / KEPT, 0.0)
        ds = p * (dp * factor[:, None] - tl.where(has_key, SCALE * delta, 0.0)[:, None])
        ds = ds.to(ds_ptr.dtype.element_ty)
        inside = (i < TIME)[:, None] & (j < TIME)[None, :]
        tl.store(ds_ptr + pairs + i[:, None] * PITCH + j[None, :], ds, mask=inside)
        at = ds_back_ptr + pairs + j[:, None] * PITCH + i[None, :]
        tl.store(at, tl.trans(ds), mask=tl.trans(inside))
    dv /= KEPT
    offset = j[:, None] * STRIDE + features[None, :]
    tl.store(dv_ptr + base + offset, dv.to(dv_ptr.dtype.element_ty), mask=(j < TIME)[:, None])
