"""Expand and compose in one kernel, as in ``expand_compose``, by `rings` of tiles.

    lora = z B
    y    = g·(base + s·lora) + bias         inner = base + s·lora

z: [rows, r], B: [r, out] or transposed, base, y, inner: [rows, out], all fp16 or all bf16; g:
f32[out]; bias: [out]. Without ADDS_BIAS base has its bias already, as in ``expand_compose``. r and
out are multiples of `ALIGNMENT`. lora stays in the fp32 accumulator and is never written to memory.
A program's strip is of z, and its results pass through the tiles that base came in.

Traffic: 1 read and 1 write of rows·out (2 writes with inner), 32 µs for 4096×8192 in bf16 at 4.2
TB/s; B once for every strip, from the level-2 cache. Flops: 2·rows·out·r.
"""

# Gluon's annotations are those of its compiler, not of what a kernel passes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
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


def config(rank: int) -> Config:
    """Returns the launch options; base and y have four tiles for each group, and inner one."""
    return Config(stages=stages(cdiv(rank, TILE), 5 * GROUPS), slots=4)


@jit
def kernel(
    base_ptr,  # [rows, out]
    z_ptr,  # [rows, r]
    lora_b_ptr,  # [r, out], or [out, r] unless OUT_LAST
    g_ptr,  # [out]
    bias_ptr,  # [out], not read unless HAS_BIAS
    y_ptr,  # [rows, out]
    inner_ptr,  # [rows, out], not written unless WITH_INNER
    rows,
    features,
    splits,
    steps,
    scale,  # a number or its address
    HAS_BIAS: gl.constexpr,
    WITH_INNER: gl.constexpr,
    RANK: gl.constexpr,
    SLICES: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,  # the tiles of base and y on their way, for each group
    OUT_LAST: gl.constexpr,
    ADDS_BIAS: gl.constexpr,  # whether base is still without its bias
):
    half: gl.constexpr = base_ptr.dtype.element_ty
    split, strip = gl.program_id(0) % splits, gl.program_id(0) // splits
    walk = (split, splits, steps, strip * 128)
    sizes = (rows, features)
    factors = gl.allocate_shared_memory(half, [STAGES * SLICES, 64, 64], LAYOUT)
    slots = gl.allocate_shared_memory(half, [SLOTS * 2, 64, 64], LAYOUT)
    results, inners = (y_ptr,), slots
    if WITH_INNER:
        results += (inner_ptr,)
        inners = gl.allocate_shared_memory(half, [2, 64, 64], LAYOUT)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    base_full, base_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    ring = (factors, full, empty, barriers(2, 1))
    base_ring = (slots, inners, base_full, base_empty)
    vectors = (g_ptr, bias_ptr, scale)
    biased: gl.constexpr = (HAS_BIAS, ADDS_BIAS)
    counts: gl.constexpr = (SLICES, STAGES, SLOTS, RANK, OUT_LAST)
    gl.warp_specialize(
        [
            (_compose, (ring, base_ring, walk, results, vectors, sizes, biased, counts, 0)),
            (_compose, (ring, base_ring, walk, results, vectors, sizes, biased, counts, 1)),
            (_fetch_rows, (ring, base_ring, walk, base_ptr, z_ptr, sizes, counts)),
            (_fetch_factor, (ring, walk, lora_b_ptr, features, counts)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, FETCH_REGISTERS, FETCH_REGISTERS],
    )


@jit
def _fetch_rows(ring, base_ring, walk, base_ptr, z_ptr, sizes, COUNTS: gl.constexpr):
    """Fetches the strip of z, a stage for each group, and then the tiles of base."""
    factors, full, _, _ = ring
    slots, _, base_full, base_empty = base_ring
    split, splits, steps, top = walk
    slices: gl.constexpr = COUNTS[0]
    z = tiles(z_ptr, sizes[0], COUNTS[3])
    for group in gl.static_range(2):
        mbarrier.expect(full.index(group), slices * 64 * 64 * 2)
        for k in gl.static_range(slices):
            at = [top + group * 64, k * 64]
            to = factors.index(group * slices + k)
            tma.async_copy_global_to_shared(z, at, full.index(group), to)
    base = tiles(base_ptr, sizes[0], sizes[1])
    for step in range(steps):
        first = (step * splits + split) * 64
        slot, phase = turn(step, COUNTS[2])
        mbarrier.wait(base_empty.index(slot), phase ^ 1)
        ready = base_full.index(slot)
        mbarrier.expect(ready, 2 * 64 * 64 * 2)
        for group in gl.static_range(2):
            to = slots.index(slot * 2 + group)
            tma.async_copy_global_to_shared(base, [top + group * 64, first], ready, to)


@jit
def _fetch_factor(ring, walk, b_ptr, features, COUNTS: gl.constexpr):
    """Fetches the tiles of B."""
    factors, full, empty, _ = ring
    split, splits, steps, _ = walk
    slices: gl.constexpr = COUNTS[0]
    if COUNTS[4]:
        b = tiles(b_ptr, COUNTS[3], features)
    else:
        b = tiles(b_ptr, features, COUNTS[3])
    for step in range(steps):
        first = (step * splits + split) * 64
        stage, phase = turn(step + 2, COUNTS[1])
        mbarrier.wait(empty.index(stage), phase ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, slices * 64 * 64 * 2)
        for k in gl.static_range(slices):
            to = factors.index(stage * slices + k)
            if COUNTS[4]:
                tma.async_copy_global_to_shared(b, [k * 64, first], ready, to)
            else:
                tma.async_copy_global_to_shared(b, [first, k * 64], ready, to)


@jit
def _compose(
    ring,
    base_ring,
    walk,
    results,
    vectors,
    sizes,
    BIASED: gl.constexpr,
    COUNTS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Composes a group's 64 rows."""
    factors, full, empty, turns = ring
    slots, inners, base_full, base_empty = base_ring
    split, splits, steps, top = walk
    g_ptr, bias_ptr, scale = vectors
    rows, features = sizes
    slices: gl.constexpr = COUNTS[0]
    size: gl.constexpr = COUNTS[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    written = (tiles(results[0], rows, features),)
    if len(results) == 2:
        written += (tiles(results[1], rows, features),)
    factor = number(scale)
    row = top + GROUP * 64
    for group in gl.static_range(2):
        mbarrier.wait(full.index(group), 0)
    strip = ()
    for k in gl.static_range(slices):
        strip += (factors.index(GROUP * slices + k).load(left),)
    for group in gl.static_range(2):
        mbarrier.arrive(empty.index(group), count=1)

    for step in range(steps):
        first = (step * splits + split) * 64
        feature = first + gl.arange(0, 64, gl.SliceLayout(0, layout))
        feature_mask = feature < features
        g = gl.load(g_ptr + feature, mask=feature_mask, other=0.0)
        g = gl.expand_dims(g.to(gl.float32), 0)
        stage, phase = turn(step + 2, COUNTS[1])
        mbarrier.wait(full.index(stage), phase)
        wait_for_turn(turns, step, GROUP)
        lora = gl.zeros((64, 64), gl.float32, layout)
        for k in gl.static_range(slices):
            b = transposed(factors.index(stage * slices + k), not COUNTS[4])
            lora = warpgroup_mma(strip[k], b, lora, use_acc=k > 0, is_async=True)
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
        # The results of the step before were written, and their tiles are free.
        tma.store_wait(0)
        mbarrier.arrive(base_empty.index((step + size - 1) % size), count=1, pred=step > 0)
        slot, phase = turn(step, size)
        mbarrier.wait(base_full.index(slot), phase)
        tile = slots.index(slot * 2 + GROUP)
        base = tile.load(layout).to(gl.float32)
        lora = warpgroup_mma_wait(0, deps=(lora,))
        mbarrier.arrive(empty.index(stage), count=1)
        scaled, unbiased = factor * lora, base
        if BIASED[0]:
            bias = gl.load(bias_ptr + feature, mask=feature_mask, other=0.0)
            bias = gl.expand_dims(bias.to(gl.float32), 0)
            if not BIASED[1]:
                unbiased -= bias
        y = base + ((g - 1.0) * unbiased + g * scaled)
        if BIASED[0] and BIASED[1]:
            y += bias  # pyright: ignore[reportPossiblyUnboundVariable]
        tile.store(y.to(tile.dtype))
        if len(results) == 2:
            inners.index(GROUP).store((unbiased + scaled).to(tile.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(written[0], [row, first], tile)
        if len(results) == 2:
            tma.async_copy_shared_to_global(written[1], [row, first], inners.index(GROUP))
    tma.store_wait(0)
