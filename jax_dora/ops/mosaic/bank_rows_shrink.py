"""Each row's products with the A of its slot, times the slot's scale, in
parts: the first kernel of `bank_rows`.

    x  [rows, in]  bf16 or fp16     A  [slots, r, in] of each member
    parts  f32[in / 64 / slices, members, rows, r]

A thread block has `slices` tiles of 64 of `in` of one member, keeps those of x, and goes through
the slots in use. Zeros lie beyond the rank of a row's slot.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.bank_rows import TILE_ROWS, Config, Sizes
from jax_dora.ops.mosaic.bank_rows_slots import (
    facts_types,
    fetch_slots,
    for_one,
    if_met,
    load_facts,
    own_numbers,
)
from jax_dora.ops.mosaic.hopper import TILE_K, tiled


def launch(
    x: jax.Array,
    lora_a: Sequence[jax.Array],
    scale: Sequence[jax.Array],
    rank: Sequence[jax.Array],
    step: jax.Array,
    first: Sequence[jax.Array],
    sizes: Sizes,
    config: Config,
) -> jax.Array:
    """Returns the parts, of as many rows as x has.

    Args:
      lora_a, scale, rank: of each member.
      first: i32[1] of each, the first slot that is meant.
    """
    c, tiles, dtype, members = config, sizes.tiles, x.dtype, len(lora_a)
    stages = c.shrink_stages
    chunks = pl.cdiv(sizes.in_features // TILE_K, c.slices)

    def kernel(x_gmem, step_gmem, *rest, **smem):
        *rest, parts_gmem = rest
        first_gmem, a_gmem, scales_gmem, ranks_gmem = (
            rest[i : i + members] for i in range(0, len(rest), members)
        )
        facts, x_smem, a_smem, out_smem = (smem[k] for k in ("facts", "x", "a", "out"))
        ready, free = smem["ready"], smem["free"]
        chunk, warpgroup = lax.axis_index("chunk"), lax.axis_index("warpgroup")
        member = lax.axis_index("member")

        def columns(slice_):
            return pl.ds((chunk * c.slices + slice_) * TILE_K, TILE_K)

        def rows(tile):
            # A start that varies: past the last row the copy engine reads zeros, writes nothing.
            return pl.ds((chunk * 0 + tile) * TILE_ROWS, TILE_ROWS)

        def fetch(warp, number):
            first, rank_gmem = first_gmem[number][0], ranks_gmem[number]

            @pl.when(warp == 0)
            def _fetch_facts():
                of_slots = {"scale": scales_gmem[number], "rank": rank_gmem}
                load_facts(step_gmem, of_slots, first, facts, sizes)

            @pl.when(warp == 1)
            def _fetch_x():
                for tile, slice_ in itertools.product(range(tiles), range(c.slices)):
                    plgpu.copy_gmem_to_smem(
                        x_gmem.at[rows(tile), columns(slice_)],
                        x_smem.at[tile * c.slices + slice_],
                        smem["x_ready"],
                    )

            def copy(_, slot, stage, box):
                for slice_ in range(c.slices):
                    plgpu.copy_gmem_to_smem(
                        a_gmem[number].at[slot, pl.ds(0, box), columns(slice_)],
                        a_smem.at[stage * c.slices + slice_, pl.ds(0, box)],
                        ready.at[stage],
                    )

            fetch_slots(warp, step_gmem, rank_gmem, first, free, stages, sizes, copy)

        @pl.when(warpgroup == tiles)
        def _fetch():
            plgpu.warp_map(lambda warp: for_one(member, members, functools.partial(fetch, warp)))

        @pl.when(warpgroup < tiles)
        def _consume():
            lax.fori_loop(0, stages, lambda i, _: plgpu.barrier_arrive(free.at[i]), None)
            plgpu.barrier_wait(facts["ready"])
            numbers = own_numbers(facts, warpgroup)
            plgpu.barrier_wait(smem["x_ready"])

            def meet(index, sums):
                stage = lax.rem(index, stages)
                plgpu.barrier_wait(ready.at[stage])

                def multiply(acc_ref):
                    for slice_ in range(c.slices):
                        a_tile = a_smem.at[stage * c.slices + slice_]
                        plgpu.wgmma(
                            acc_ref,
                            x_smem.at[warpgroup * c.slices + slice_],
                            a_tile.transpose((1, 0)),
                        )
                    return acc_ref[...]

                def product(slot):
                    # What lies beyond the slot's rank was left by another one.
                    own = lax.broadcasted_iota(jnp.int32, shape, 1) < facts["rank"][slot]
                    return jnp.where(
                        own, facts["scale"][slot] * pl.run_scoped(multiply, accumulator), 0.0
                    )

                sums = if_met(facts, index, warpgroup, numbers, sums, product)
                plgpu.barrier_arrive(free.at[stage])
                return sums

            shape = (TILE_ROWS, sizes.rank)
            accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
            start = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            sums = lax.fori_loop(0, facts["step"][0], meet, start)
            out_smem[warpgroup] = sums
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_smem.at[warpgroup], parts_gmem.at[chunk, member, rows(warpgroup)]
            )
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((chunks, members, x.shape[0], sizes.rank), jnp.float32),
        grid=(chunks, members),
        grid_names=("chunk", "member"),
        num_threads=tiles + 1,
        thread_name="warpgroup",
        scratch_types={
            "facts": facts_types(sizes, {"scale": jnp.float32, "rank": jnp.int32}),
            "x": tiled((tiles * c.slices, TILE_ROWS, TILE_K), dtype),
            "x_ready": plgpu.Barrier(num_arrivals=tiles * c.slices),
            "a": tiled((stages * c.slices, sizes.rank, TILE_K), dtype),
            "out": tiled((tiles, TILE_ROWS, sizes.rank), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=c.slices, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
        },
        kernel_name="dora_bank_rows_shrink",
    )(x, step, *first, *lora_a, *scale, *rank)
