"""The norm in one pass over the weight, as in ``one_pass_norm``, by strips of B.

    norm = √ Σ_in (W + s·B A)²

W: [out, in], fp16 or bf16, or ``codes``, two of 4 bits in a byte along the last axis, whose values
are multiplied by scales; B: [out, r], A: [r, in], both fp16 or both bf16, or f16 pieces of fp32 as
``adapter_pieces`` makes; or all three transposed. Each program writes one sum of squares for each
of its features, [splits, out] in fp32. Nothing cancels, and a NaN stays a NaN.

Traffic: W once, 32 µs for 8192×8192 in bf16 at 4.2 TB/s; A once for every strip, from the level-2
cache. Flops: 2·out·in·r.
"""

import triton.language as tl

from dora_common.triton.codes import decoded
from dora_common.triton.jit import bound, jit, number
from dora_common.triton.strips import Config, depth, dot, factor_pointers, load_factor, load_tile


def config(rank: int, *, is_coded: bool, out_last: bool) -> Config:
    """Returns the fastest config of an H200 (8192 × 8192 at rank 64). For codes, which were not
    measured, it fits every card."""
    if is_coded:
        return Config(64, 64, depth(rank), 4, 2)
    return Config(128, 64, depth(rank, 128), 4 if out_last else 8)


@jit
def kernel(
    weight_ptr,  # [out, in], or [in, out] if OUT_LAST; or codes
    levels_ptr,  # f32[16], for codes of 4 bits
    scales_ptr,  # for codes: f32[out·in / RUN], or [in / RUN, out] if OUT_LAST
    lora_a_ptr,  # [r, in], or [in, r] if OUT_LAST; or two such pieces, f16
    lora_b_ptr,  # [out, r], or [r, out] if OUT_LAST; or two such pieces, f16
    unit_a_ptr,  # f32[in], for pieces
    unit_b_ptr,  # f32[out], for pieces
    partial_ptr,  # f32[splits, out]
    in_features,
    out_features,
    splits,
    steps,
    scale,  # a number or its address
    OUT_LAST: tl.constexpr,
    CODES: tl.constexpr,  # the kind of codes, see `codes`
    RUN: tl.constexpr,  # how many codes share a scale: of the whole W, or of a column if OUT_LAST
    GROUP: tl.constexpr,  # inputs are scaled in groups of this size, each within a run
    PIECES: tl.constexpr,  # whether the adapter is in pieces
    RANK: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):
    split, strip = tl.program_id(0) % splits, tl.program_id(0) // splits
    feature = strip * FEATURES + tl.arange(0, FEATURES)  # [FEATURES]
    feature_mask = feature < out_features
    inside = tl.arange(0, DEPTH)  # [DEPTH]
    low_a, low_b = tl.cast(in_features, tl.int64) * RANK, tl.cast(out_features, tl.int64) * RANK
    strip_b = ()  # SLICES times one or two tiles [DEPTH, FEATURES] or [FEATURES, DEPTH]
    for k in tl.static_range(0, SLICES):  # pyright: ignore[reportGeneralTypeIssues]
        r = k * DEPTH + inside
        b_ptrs = factor_pointers(lora_b_ptr, r, feature, RANK, out_features, OUT_LAST)
        b = _factor(b_ptrs, low_b, r < RANK, feature_mask, OUT_LAST, PIECES)
        strip_b += (b[0], b[1]) if PIECES else (b[0],)
    factor = number(scale)
    if PIECES:
        units = tl.load(unit_b_ptr + feature, mask=feature_mask, other=0.0)
        unit_b = units[None, :] if OUT_LAST else units[:, None]

    # A sum over rows of a tile is one across threads, and taken last.
    if OUT_LAST:
        total = tl.zeros((WIDTH, FEATURES), tl.float32)
    else:
        total = tl.zeros((FEATURES,), tl.float32)
    for step in tl.range(0, bound(steps), num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        first = (step * splits + split) * WIDTH
        index = first + tl.arange(0, WIDTH)  # [WIDTH], of inputs
        weight = _weight(
            *(weight_ptr, levels_ptr, scales_ptr, first, strip, in_features, out_features),
            *(OUT_LAST, CODES, RUN, GROUP, FEATURES, WIDTH),
        )
        if OUT_LAST:
            product = tl.zeros((WIDTH, FEATURES), tl.float32)
        else:
            product = tl.zeros((FEATURES, WIDTH), tl.float32)
        for k in tl.static_range(0, SLICES):  # pyright: ignore[reportGeneralTypeIssues]
            held = strip_b[(1 + PIECES) * k], strip_b[(1 + PIECES) * k + PIECES]
            r_a = k * DEPTH + inside
            a_ptrs = factor_pointers(lora_a_ptr, r_a, index, RANK, in_features, not OUT_LAST)
            a = _factor(a_ptrs, low_a, r_a < RANK, index < in_features, not OUT_LAST, PIECES)
            product = _added(product, held, a, OUT_LAST, PIECES)
        if PIECES:
            unit_a = tl.load(unit_a_ptr + index, mask=index < in_features, other=0.0)
            product *= unit_b  # pyright: ignore[reportPossiblyUnboundVariable]
            product *= unit_a[:, None] if OUT_LAST else unit_a[None, :]
        adapted = weight.to(tl.float32) + factor * product
        if OUT_LAST:
            total += adapted * adapted
        else:
            total += tl.sum(adapted * adapted, axis=1)
    if OUT_LAST:
        total = tl.sum(total, axis=0)
    at = split.to(tl.int64) * out_features + feature
    tl.store(partial_ptr + at, total, mask=feature_mask)


@jit
def _factor(pointers, low, r_mask, mask, RANK_FIRST: tl.constexpr, PIECES: tl.constexpr):
    """Returns a tile of a factor, and of its low pieces, ``low`` elements later, or the same
    again."""
    high = load_factor(pointers, r_mask, mask, RANK_FIRST)
    if PIECES:
        return high, load_factor(pointers + low, r_mask, mask, RANK_FIRST)
    return high, high


@jit
def _added(total, b, a, OUT_LAST: tl.constexpr, PIECES: tl.constexpr):
    """Returns the sum with the products of two tiles, or of their pieces."""
    total = dot(a[0], b[0], total) if OUT_LAST else dot(b[0], a[0], total)
    if PIECES:
        total = dot(a[1], b[0], total) if OUT_LAST else dot(b[0], a[1], total)
        total = dot(a[0], b[1], total) if OUT_LAST else dot(b[1], a[0], total)
    return total


@jit
def _weight(
    weight_ptr,
    levels_ptr,
    scales_ptr,
    first,
    strip,
    in_features,
    out_features,
    OUT_LAST: tl.constexpr,
    CODES: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Returns W [FEATURES, WIDTH], or [WIDTH, FEATURES] if OUT_LAST, from an input on."""
    is_packed: tl.constexpr = CODES == "int4" or CODES == "high4"  # pyright: ignore
    per: tl.constexpr = 2 if is_packed else 1  # pyright: ignore[reportAssignmentType]
    feature = strip * FEATURES + tl.arange(0, FEATURES)
    if OUT_LAST:
        item = strip * (FEATURES // per) + tl.arange(0, FEATURES // per)
        row, rows, items = first + tl.arange(0, WIDTH), in_features, out_features // per
    else:
        item = first // per + tl.arange(0, WIDTH // per)
        row, rows, items = feature, out_features, in_features // per
    weight = decoded(load_tile(weight_ptr, row, item, rows, items), levels_ptr, CODES)
    if CODES != "":
        group = first // GROUP + tl.arange(0, WIDTH // GROUP)
        known = group * GROUP < in_features
        if OUT_LAST:
            at = (group * GROUP // RUN).to(tl.int64)[:, None] * out_features + feature[None, :]
            mask = known[:, None] & (feature < out_features)[None, :]
            scales = tl.load(scales_ptr + at, mask=mask, other=0.0).to(tl.float32)
            weight = weight.reshape(WIDTH // GROUP, GROUP, FEATURES) * scales[:, None, :]
            weight = weight.reshape(WIDTH, FEATURES)
        else:
            at = (feature.to(tl.int64)[:, None] * in_features + group[None, :] * GROUP) // RUN
            mask = (feature < out_features)[:, None] & known[None, :]
            scales = tl.load(scales_ptr + at, mask=mask, other=0.0).to(tl.float32)
            weight = weight.reshape(FEATURES, WIDTH // GROUP, GROUP) * scales[:, :, None]
            weight = weight.reshape(FEATURES, WIDTH)
    return weight
