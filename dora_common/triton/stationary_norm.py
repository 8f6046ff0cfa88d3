"""The norm in one pass over the weight, as in ``one_pass_norm``, with strips of B in registers.

    norm = √ Σ_in (W + s·B A)²

W: [out, in], fp16 or bf16; B: [out, r], A: [r, in], both fp16 or both bf16; or all three
transposed. Rows are multiples of `ALIGNMENT`. Each program writes one sum of squares for each of
its features, [splits, out] in fp32. Nothing cancels, and a NaN stays a NaN.

Traffic: W once, 32 µs for 8192×8192 in bf16 at 4.2 TB/s; A once for every strip, from the level-2
cache. Flops: 2·out·in·r, 64 µs at r = 384 and 800 TFLOP/s.
"""

import triton.language as tl

from dora_common.triton.jit import bound, jit, number
from dora_common.triton.stationary import in_registers, tile_at, tiles_of
from dora_common.triton.strips import dot, factor_pointers, load_factor


@jit
def kernel(
    weight_ptr,  # [out, in], or [in, out] if OUT_LAST
    lora_a_ptr,  # [r, in], or [in, r] if OUT_LAST
    lora_b_ptr,  # [out, r], or [r, out] if OUT_LAST
    partial_ptr,  # f32[splits, out]
    in_features,
    out_features,
    splits,
    steps,
    scale,  # a number or its address
    OUT_LAST: tl.constexpr,
    RANK: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    split, strip = tl.program_id(0) % splits, tl.program_id(0) // splits
    top = strip * FEATURES
    feature = top + tl.arange(0, FEATURES)  # [FEATURES]
    feature_mask = feature < out_features
    w_tiles = tiles_of(weight_ptr, out_features, in_features, FEATURES, WIDTH, OUT_LAST)
    a_tiles = tiles_of(lora_a_ptr, RANK, in_features, DEPTH, WIDTH, OUT_LAST)
    strip_b = ()  # SLICES tiles [FEATURES, DEPTH]
    for k in tl.static_range(0, SLICES):  # pyright: ignore[reportGeneralTypeIssues]
        r = k * DEPTH + tl.arange(0, DEPTH)
        pointers = factor_pointers(lora_b_ptr, r, feature, RANK, out_features, OUT_LAST)
        b = load_factor(pointers, r < RANK, feature_mask, OUT_LAST)
        if OUT_LAST:
            b = tl.trans(b)
        strip_b += (in_registers(b, DEPTH),)
    factor = number(scale)

    total = tl.zeros((FEATURES,), tl.float32)
    for step in tl.range(0, bound(steps), num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        first = (step * splits + split) * WIDTH
        weight = tile_at(w_tiles, top, first, OUT_LAST)
        product = tl.zeros((FEATURES, WIDTH), tl.float32)
        for k in tl.static_range(0, SLICES):  # pyright: ignore[reportGeneralTypeIssues]
            a = tile_at(a_tiles, k * DEPTH, first, OUT_LAST)
            product = dot(strip_b[k], a, product)
        adapted = weight.to(tl.float32) + factor * product
        total += tl.sum(adapted * adapted, axis=1)
    at = split.to(tl.int64) * out_features + feature
    tl.store(partial_ptr + at, total, mask=feature_mask)
