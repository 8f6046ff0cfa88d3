"""Each row's product with the B of its slot, and what follows it, in one pass over the result: the
second kernel of `bank_rows`.

    z  [members, rows, k]  bf16 or fp16, times the slot's scale, zero beyond its rank
    B  [slots, r, out]     base, y  [rows, out]     g  f32[slots, out]     bias  [out] (optional)
                                                                           of each member

A thread block has 64 columns of one member and goes through the slots in use. Past a slot's rank a
stage keeps what was there, which zeros of z meet: it has to be finite, and is, since stages begin
as zeros and a bank holds nothing else. The slots' g lie side by side until all have come, and each
row takes its own then.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.bank_rows_sizes import TILE_ROWS, WARPS, Config, Sizes, padded
from jax_dora.ops.mosaic.bank_rows_slots import (
    clear,
    fetch_slots,
    for_one,
    looked_up,
    own_numbers,
    products,
    spare,
)
from jax_dora.ops.mosaic.hopper import TILE_K, tiled

COLS = 64


def launch(
    base: Sequence[jax.Array],
    z: jax.Array,
    lora_b: Sequence[jax.Array],
    g: Sequence[jax.Array] | None,
    rank: Sequence[jax.Array],
    plan: jax.Array,
    first: Sequence[jax.Array],
    bias: Sequence[jax.Array] | None,
    sizes: Sizes,
    config: Config,
) -> Sequence[jax.Array]:
    """Returns y of each member, of as many rows as base has; `first` is i32[1] of each."""
    stages, tiles, dtype = config.expand_stages, sizes.tiles, z.dtype
    depth = padded(sizes.rank)
    slices = depth // TILE_K
    members = len(base)
    ends = list(itertools.accumulate(one.shape[1] // COLS for one in base))
    operands = [first, base, lora_b, rank, *([g] if g else []), *([bias] if bias else [])]

    def kernel(z_gmem, plan_gmem, *rest, **smem):
        of_operands = [rest[i : i + members] for i in range(0, len(rest), members)]
        first_gmem, base_gmem, b_gmem, ranks_gmem, *extra_gmem, y_gmem = of_operands
        g_gmem = extra_gmem[0] if g else None
        bias_gmem = extra_gmem[-1] if bias else None
        z_smem, b_smem, y_smem = (smem[k] for k in ("z", "b", "y"))
        ready, free, rows_ready = smem["ready"], smem["free"], smem["rows_ready"]
        warpgroup = lax.axis_index("warpgroup")
        strip = lax.axis_index("strip")
        member = sum(((strip >= end).astype(jnp.int32) for end in ends[:-1]), jnp.int32(0))
        begin = jnp.int32(0)
        for end in ends[:-1]:
            begin = jnp.where(strip >= end, end, begin)
        cols = pl.ds((strip - begin) * COLS, COLS)

        def rows(tile):
            # A start that varies: past the last row the copy engine reads zeros, writes nothing.
            return pl.ds((strip * 0 + tile) * TILE_ROWS, TILE_ROWS)

        def fetch(warp, number):
            first = first_gmem[number][0]

            @pl.when(warp == WARPS - 1)
            def _fetch_rows():
                for tile, slice_ in itertools.product(range(tiles), range(slices)):
                    plgpu.copy_gmem_to_smem(
                        z_gmem.at[number, rows(tile), pl.ds(slice_ * TILE_K, TILE_K)],
                        z_smem.at[tile * slices + slice_],
                        rows_ready,
                    )
                for tile in range(tiles):
                    plgpu.copy_gmem_to_smem(
                        base_gmem[number].at[rows(tile), cols], y_smem.at[tile], rows_ready
                    )
                if bias_gmem is not None:
                    plgpu.copy_gmem_to_smem(bias_gmem[number].at[cols], smem["bias"], rows_ready)

            def copy(index, slot, stage, box):
                plgpu.copy_gmem_to_smem(
                    b_gmem[number].at[slot, pl.ds(0, box), cols],
                    b_smem.at[stage, pl.ds(0, box)],
                    ready.at[stage],
                )
                if g_gmem is not None:
                    plgpu.copy_gmem_to_smem(
                        g_gmem[number].at[slot, cols],
                        smem["g"].at[index],
                        ready.at[stage],
                    )

            fetch_slots(warp, plan_gmem, ranks_gmem[number], first, free, stages, sizes, copy)

        @pl.when(warpgroup == tiles)
        def _fetch():
            plgpu.warp_map(lambda warp: for_one(member, members, functools.partial(fetch, warp)))

        @pl.when(warpgroup < tiles)
        def _consume():
            clear(b_smem, warpgroup, tiles)
            lax.fori_loop(0, stages, lambda i, _: plgpu.barrier_arrive(free.at[i]), None)
            numbers = own_numbers(plan_gmem, warpgroup, sizes)
            plgpu.barrier_wait(rows_ready)

            def of_stage(stage):
                return [b_smem.at[stage, pl.ds(i * TILE_K, TILE_K)] for i in range(slices)]

            at = [warpgroup * slices + i for i in range(slices)]
            left = [(z_smem[i], smem.get("spare", z_smem).at[i]) for i in at]
            sums = products(plan_gmem[0], numbers, left, of_stage, ready, free, COLS)
            base = y_smem[warpgroup].astype(jnp.float32)
            y = base + sums
            if g_gmem is not None:
                y = looked_up(smem["g"], numbers) * y
            number = lax.broadcast_in_dim(numbers, y.shape, (0,))
            y = jnp.where(number >= 0, y, jnp.where(number == -1, base, jnp.nan))
            if bias_gmem is not None:
                y = y + lax.broadcast_in_dim(smem["bias"][...], y.shape, (1,))
            y_smem[warpgroup] = y.astype(dtype)
            plgpu.commit_smem()

            def store(number):
                plgpu.copy_smem_to_gmem(
                    y_smem.at[warpgroup], y_gmem[number].at[rows(warpgroup), cols]
                )

            for_one(member, members, store)
            plgpu.wait_smem_to_gmem(0)

    scratch = spare((tiles * slices, TILE_ROWS, TILE_K), dtype) | {
        "z": tiled((tiles * slices, TILE_ROWS, TILE_K), dtype),
        "b": tiled((stages, depth, COLS), dtype),
        "y": tiled((tiles, TILE_ROWS, COLS), dtype),
        "rows_ready": plgpu.Barrier(num_arrivals=tiles * (1 + slices) + bool(bias)),
        "ready": plgpu.Barrier(num_arrivals=1 + bool(g), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
    }
    if g:
        scratch["g"] = plgpu.SMEM((sizes.in_use, COLS), jnp.float32)
    if bias:
        scratch["bias"] = plgpu.SMEM((COLS,), jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(one.shape, dtype) for one in base],
        grid=(ends[-1],),
        grid_names=("strip",),
        num_threads=tiles + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="dora_bank_rows_expand",
    )(z, plan, *itertools.chain(*operands))
