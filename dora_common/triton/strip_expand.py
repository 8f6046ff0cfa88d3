"""Expand and compose in one kernel, as in ``expand_compose``, by strips of B.

    lora     = z Bᵀ
    unbiased = base - bias                  (base if there is no bias)
    y        = base + ((g-1)·unbiased + g·(s·lora))       inner = unbiased + s·lora

z: [rows, r], lora_b B: [out, r], base, y, inner: [rows, out], all fp16 or all bf16; g: f32[out];
bias: [out]. lora stays in the fp32 accumulator and is never written to memory.

Traffic: 1 read and 1 write of rows·out (2 writes with inner), 32 µs for 4096×8192 in bf16 at 4.2
TB/s; z once for every strip, from the level-2 cache. Flops: 2·rows·out·r.
"""

import triton.language as tl

from dora_common.triton.jit import bound, jit, number
from dora_common.triton.strips import Config, depth, dot, factor_pointers, load_factor, load_tile


def config(rank: int) -> Config:
    """Returns the fastest config of an H200 (4096 × 8192 at rank 64)."""
    return Config(64, 64, depth(rank, 128), 4, 4)


@jit
def kernel(
    base_ptr,  # [rows, out]
    z_ptr,  # [rows, r]
    lora_b_ptr,  # [out, r], or [r, out] if OUT_LAST
    g_ptr,  # [out]
    bias_ptr,  # [out], not read unless HAS_BIAS
    y_ptr,  # [rows, out]
    inner_ptr,  # [rows, out], not written unless WITH_INNER
    rows,
    features,
    splits,
    steps,
    scale,  # a number or its address
    OUT_LAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS_BIAS: tl.constexpr,  # whether base is still without its bias
    WITH_INNER: tl.constexpr,
    RANK: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    split, strip = tl.program_id(0) % splits, tl.program_id(0) // splits
    feature = strip * FEATURES + tl.arange(0, FEATURES)  # [FEATURES]
    feature_mask = feature < features
    inside = tl.arange(0, DEPTH)  # [DEPTH]
    strip_b = ()  # SLICES times [DEPTH, FEATURES]
    for k in tl.static_range(0, SLICES):  # pyright: ignore[reportGeneralTypeIssues]
        r = k * DEPTH + inside
        b_ptrs = factor_pointers(lora_b_ptr, r, feature, RANK, features, OUT_LAST)
        strip_b += (_of_rank(b_ptrs, r < RANK, feature_mask, OUT_LAST),)
    g = tl.load(g_ptr + feature, mask=feature_mask, other=0.0).to(tl.float32)[None, :]
    bias = tl.zeros_like(g)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=feature_mask, other=0.0).to(tl.float32)[None, :]
    factor = number(scale)

    for step in tl.range(0, bound(steps), num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        row = (step * splits + split) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
        stored = load_tile(base_ptr, row, feature, rows, features)
        lora = tl.zeros((WIDTH, FEATURES), tl.float32)
        for k in tl.static_range(0, SLICES):  # pyright: ignore[reportGeneralTypeIssues]
            z = load_tile(z_ptr, row, k * DEPTH + inside, rows, RANK)
            lora = dot(z, strip_b[k], lora)
        base = stored.to(tl.float32)
        unbiased = base
        if HAS_BIAS:
            if ADDS_BIAS:
                base += bias
            else:
                unbiased -= bias
        scaled = factor * lora
        y = base + ((g - 1.0) * unbiased + g * scaled)
        # rows·out may exceed 2³¹.
        offset = row.to(tl.int64)[:, None] * features + feature[None, :]
        mask = (row < rows)[:, None] & feature_mask[None, :]
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
        if WITH_INNER:
            inner = (unbiased + scaled).to(inner_ptr.dtype.element_ty)
            tl.store(inner_ptr + offset, inner, mask=mask)


@jit
def _of_rank(pointers, r_mask, mask, RANK_FIRST: tl.constexpr):
    """Returns a tile [DEPTH, FEATURES] of Bᵀ."""
    b = load_factor(pointers, r_mask, mask, RANK_FIRST)
    return b if RANK_FIRST else tl.trans(b)
