"""The norm in one pass over the weight, as in ``one_pass_norm``, by `rings` of tiles.

    norm = √ Σ_in (W + s·A B)²

W: [in, out], fp16 or bf16; A: [in, r], B: [r, out], both fp16 or both bf16, or f16 pieces of fp32
as ``adapter_pieces`` makes; or all three transposed. Rows are multiples of `ALIGNMENT`. Each
program writes one sum of squares for each of its features, [splits, out] in fp32. Nothing cancels,
and a NaN stays a NaN.

Traffic: W once, 32 µs for 8192×8192 in bf16 at 4.2 TB/s; A once for every strip, from the level-2
cache. Flops: 2·out·in·r, three times that for pieces; 64 µs at r = 384 and 800 TFLOP/s.
"""

# Gluon's annotations are those of its compiler, not of what a kernel passes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dora_common.triton.jit import cdiv
from dora_common.triton.rings import (
    CONSUMER_REGISTERS,
    FETCH_REGISTERS,
    GROUPS,
    LAYOUT,
    TILE,
    Config,
    barriers,
    jit,
    number,
    stages,
    tiles,
    transposed,
    turn,
    wait_for_turn,
)


def config(rank: int, pieces: int) -> Config:
    """Returns the launch options: each stage has a tile of W for each group, too. Short products
    are of 128 inputs at a time."""
    needed = pieces * cdiv(rank, TILE) + GROUPS
    if needed <= 4:
        return Config(width=2 * TILE, stages=stages(2 * needed))
    return Config(stages=stages(needed))


@jit
def kernel(
    weight_ptr,  # [in, out], or [out, in] unless OUT_LAST
    lora_a_ptr,  # [in, r], or [r, in]; or two such pieces, f16
    lora_b_ptr,  # [r, out], or [out, r]; or two such pieces, f16
    unit_a_ptr,  # f32[in], for pieces
    unit_b_ptr,  # f32[out], for pieces
    partial_ptr,  # f32[splits, out]
    in_features,
    out_features,
    splits,
    steps,
    scale,  # a number or its address
    PIECES: gl.constexpr,  # 2 if the adapter is in pieces, or 1
    RANK: gl.constexpr,
    SLICES: gl.constexpr,
    STAGES: gl.constexpr,
    WIDTH: gl.constexpr,  # the inputs of a step; 64 unless OUT_LAST
    OUT_LAST: gl.constexpr,
):
    held: gl.constexpr = SLICES * PIECES
    split, strip = gl.program_id(0) % splits, gl.program_id(0) // splits
    top = strip * 128
    half: gl.constexpr = lora_a_ptr.dtype.element_ty
    factors = gl.allocate_shared_memory(half, [STAGES * held, WIDTH, 64], LAYOUT)
    weight_type: gl.constexpr = weight_ptr.dtype.element_ty
    weights = gl.allocate_shared_memory(weight_type, [STAGES * 2, WIDTH, 64], LAYOUT)
    # Of a stage, the tiles of A and W arrive.
    full, empty = barriers(STAGES, 2), barriers(STAGES, 2)
    ring = (factors, weights, full, empty, barriers(2, 1))
    walk = (split, splits, steps, top)
    vectors = (unit_a_ptr, unit_b_ptr, scale, partial_ptr)
    sizes = (in_features, out_features)
    counts: gl.constexpr = (PIECES, SLICES, STAGES, WIDTH, RANK, OUT_LAST)
    gl.warp_specialize(
        [
            (_add_up, (ring, walk, vectors, sizes, counts, 0)),
            (_add_up, (ring, walk, vectors, sizes, counts, 1)),
            (_fetch_strip, (ring, top, lora_b_ptr, out_features, counts)),
            (_fetch_factor, (ring, walk, lora_a_ptr, in_features, counts)),
            (_fetch_weight, (ring, walk, weight_ptr, sizes, counts)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, FETCH_REGISTERS, FETCH_REGISTERS, FETCH_REGISTERS],
    )


@jit
def _fetch_strip(ring, top, b_ptr, out_features, COUNTS: gl.constexpr):
    """Fetches the strip of B, a stage for each group."""
    factors, _, full, _, _ = ring
    slices: gl.constexpr = COUNTS[1]
    held: gl.constexpr = slices * COUNTS[0]
    if COUNTS[5]:
        b = tiles(b_ptr, COUNTS[0] * COUNTS[4], out_features)
    else:
        b = tiles(b_ptr, COUNTS[0] * out_features, COUNTS[4])
    for group in gl.static_range(2):
        mbarrier.expect(full.index(group), held * 64 * 64 * 2)
        for k in gl.static_range(held):
            if COUNTS[5]:
                at = [k // slices * COUNTS[4] + k % slices * 64, top + group * 64]
            else:
                at = [k // slices * out_features + top + group * 64, k % slices * 64]
            to = factors.index(group * held + k).slice(0, 64)
            tma.async_copy_global_to_shared(b, at, full.index(group), to)


@jit
def _fetch_factor(ring, walk, a_ptr, in_features, COUNTS: gl.constexpr):
    """Fetches the tiles of A."""
    factors, _, full, empty, _ = ring
    split, splits, steps, _ = walk
    slices: gl.constexpr = COUNTS[1]
    held: gl.constexpr = slices * COUNTS[0]
    width: gl.constexpr = COUNTS[3]
    if COUNTS[5]:
        a = tiles(a_ptr, COUNTS[0] * in_features, COUNTS[4], width)
    else:
        a = tiles(a_ptr, COUNTS[0] * COUNTS[4], in_features)
    for step in range(steps):
        stage, phase = turn(step + 2, COUNTS[2])
        mbarrier.wait(empty.index(stage), phase ^ 1)
        first = (step * splits + split) * width
        ready = full.index(stage)
        mbarrier.expect(ready, held * width * 64 * 2)
        for k in gl.static_range(held):
            if COUNTS[5]:
                at = [k // slices * in_features + first, k % slices * 64]
            else:
                at = [k // slices * COUNTS[4] + k % slices * 64, first]
            to = factors.index(stage * held + k)
            tma.async_copy_global_to_shared(a, at, ready, to)


@jit
def _fetch_weight(ring, walk, weight_ptr, sizes, COUNTS: gl.constexpr):
    """Fetches the tiles of W."""
    _, weights, full, empty, _ = ring
    split, splits, steps, top = walk
    width: gl.constexpr = COUNTS[3]
    if COUNTS[5]:
        w = tiles(weight_ptr, sizes[0], sizes[1], width)
    else:
        w = tiles(weight_ptr, sizes[1], sizes[0])
    for group in gl.static_range(2):
        mbarrier.arrive(full.index(group), count=1)
    for step in range(steps):
        stage, phase = turn(step + 2, COUNTS[2])
        mbarrier.wait(empty.index(stage), phase ^ 1)
        first = (step * splits + split) * width
        ready = full.index(stage)
        mbarrier.expect(ready, 2 * width * 64 * 2)
        for group in gl.static_range(2):
            if COUNTS[5]:
                at = [first, top + group * 64]
            else:
                at = [top + group * 64, first]
            tma.async_copy_global_to_shared(w, at, ready, weights.index(stage * 2 + group))


@jit
def _add_up(ring, walk, vectors, sizes, COUNTS: gl.constexpr, GROUP: gl.constexpr):
    """Adds the squares of a group's 64 features up."""
    factors, weights, full, empty, turns = ring
    split, splits, steps, top = walk
    unit_a_ptr, unit_b_ptr, scale, partial_ptr = vectors
    in_features, out_features = sizes
    # The transposed product, (A B)ᵀ = Bᵀ Aᵀ: [64 features, inputs].
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNTS[3], 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    pieces: gl.constexpr = COUNTS[0]
    slices: gl.constexpr = COUNTS[1]
    held: gl.constexpr = slices * pieces
    width: gl.constexpr = COUNTS[3]
    feature = top + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    feature_mask = feature < out_features
    factor = number(scale)
    if pieces == 2:
        unit_b = factor * gl.load(unit_b_ptr + feature, mask=feature_mask, other=0.0)

    for group in gl.static_range(2):
        mbarrier.wait(full.index(group), 0)
    strip = ()
    for k in gl.static_range(held):
        of_b = factors.index(GROUP * held + k).slice(0, 64)
        strip += (transposed(of_b, COUNTS[5]).load(left),)
    for group in gl.static_range(2):
        mbarrier.arrive(empty.index(group), count=1)

    total = gl.zeros((64, width), gl.float32, layout)
    for step in range(steps):
        stage, phase = turn(step + 2, COUNTS[2])
        if pieces == 2:
            index = (step * splits + split) * width + gl.arange(0, width, gl.SliceLayout(0, layout))
            unit_a = gl.load(unit_a_ptr + index, mask=index < in_features, other=0.0)
        mbarrier.wait(full.index(stage), phase)
        wait_for_turn(turns, step, GROUP)
        product = gl.zeros((64, width), gl.float32, layout)
        for k in gl.static_range(held):
            a = transposed(factors.index(stage * held + k), COUNTS[5])
            # Not low times low.
            for piece in gl.static_range(1 if k >= slices else pieces):
                b = strip[k % slices + piece * slices]
                product = warpgroup_mma(b, a, product, use_acc=k + piece > 0, is_async=True)
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
        weight = transposed(weights.index(stage * 2 + GROUP), COUNTS[5])
        weight = weight.load(layout).to(gl.float32)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(stage), count=1)
        if pieces == 2:
            product *= gl.expand_dims(unit_a, 0)  # pyright: ignore[reportPossiblyUnboundVariable]
            product *= gl.expand_dims(unit_b, 1)  # pyright: ignore[reportPossiblyUnboundVariable]
            adapted = weight + product
        else:
            adapted = weight + factor * product
        total += adapted * adapted
    at = split.to(gl.int64) * out_features + feature
    gl.store(partial_ptr + at, gl.sum(total, 1), mask=feature_mask)
