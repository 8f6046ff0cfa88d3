"""Expand and compose in one kernel, as in ``expand_compose``, with strips of z in registers.

    lora     = z Bᵀ
    unbiased = base - bias                  (base if there is no bias)
    y        = base + ((g-1)·unbiased + g·(s·lora))       inner = unbiased + s·lora

z: [rows, r], lora_b B: [out, r], base, y, inner: [rows, out], all fp16 or all bf16; g: f32[out];
bias: [out]. r and out are multiples of `ALIGNMENT`. lora stays in the fp32 accumulator and is never
written to memory.

Traffic: 1 read and 1 write of rows·out (2 writes with inner), 32 µs for 4096×8192 in bf16 at 4.2
TB/s; B once for every strip, from the level-2 cache. Flops: 2·rows·out·r.
"""

import triton.language as tl

from dora_common.triton.jit import bound, jit, number
from dora_common.triton.stationary import in_registers, tile_at, tiles_of
from dora_common.triton.strips import dot, load_tile


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
    FEATURES: tl.constexpr,  # the rows of a strip
    WIDTH: tl.constexpr,  # the output features of a tile
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    split, strip = tl.program_id(0) % splits, tl.program_id(0) // splits
    top = strip * FEATURES
    row = top + tl.arange(0, FEATURES)  # [FEATURES]
    inside = tl.arange(0, DEPTH)  # [DEPTH]
    base_tiles = tiles_of(base_ptr, rows, features, FEATURES, WIDTH, False)
    b_tiles = tiles_of(lora_b_ptr, RANK, features, DEPTH, WIDTH, not OUT_LAST)
    strip_z = ()  # SLICES tiles [FEATURES, DEPTH]
    for k in tl.static_range(0, SLICES):  # pyright: ignore[reportGeneralTypeIssues]
        strip_z += (in_registers(load_tile(z_ptr, row, k * DEPTH + inside, rows, RANK), DEPTH),)
    factor = number(scale)

    for step in tl.range(0, bound(steps), num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        first = (step * splits + split) * WIDTH
        feature = first + tl.arange(0, WIDTH)  # [WIDTH]
        feature_mask = feature < features
        stored = tile_at(base_tiles, top, first, False)
        lora = tl.zeros((FEATURES, WIDTH), tl.float32)
        for k in tl.static_range(0, SLICES):  # pyright: ignore[reportGeneralTypeIssues]
            b = tile_at(b_tiles, k * DEPTH, first, not OUT_LAST)
            lora = dot(strip_z[k], b, lora)
        g = tl.load(g_ptr + feature, mask=feature_mask, other=0.0).to(tl.float32)[None, :]
        base = stored.to(tl.float32)
        unbiased = base
        if HAS_BIAS:
            bias = tl.load(bias_ptr + feature, mask=feature_mask, other=0.0)
            bias = bias.to(tl.float32)[None, :]
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
