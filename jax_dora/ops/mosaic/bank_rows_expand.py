"""The second kernel of `bank_rows`: each row's product with the B of its slot.

    z  [members, rows, k]  bf16 or fp16, zero beyond the rank of the row's slot
    B  [slots, r, out]     y  [rows, out]     of each member

A thread block has 64 columns of one member and loops over the slots in use. Beyond a slot's rank, a
stage still has elements of an earlier slot, which are multiplied by zeros of z. They are finite:
stages are cleared at the beginning, and a bank's adapters are finite.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.bank_rows_sizes import TILE_ROWS, WARPS, Config, Member, Sizes, padded
from jax_dora.ops.mosaic.bank_rows_slots import (
    clear,
    fetch_slots,
    for_member,
    load_slot_indices,
    locate_strip,
    mask_buffer,
    products,
)
from jax_dora.ops.mosaic.hopper import TILE_K, tiled

COLS = 64


def launch(
    z: jax.Array, members: Sequence[Member], plan: jax.Array, sizes: Sizes, config: Config
) -> Sequence[jax.Array]:
    """Returns y of each member, for the padded rows of z; the other arguments are a `Call`'s."""
    stages, tiles, dtype, count = config.expand_stages, sizes.tiles, z.dtype, len(members)
    depth = padded(sizes.rank)
    slices = depth // TILE_K
    strips = [m.lora_b.shape[2] // COLS for m in members]
    operands = [[getattr(m, name) for m in members] for name in ("first", "rank", "lora_b")]

    def kernel(z_gmem, plan_gmem, *rest, **smem):
        # Of each member: [1], [slots], [slots, r, out], [rows, out].
        first_gmem, ranks_gmem, b_gmem, y_gmem = itertools.batched(rest, count)
        z_smem, b_smem, y_smem = (smem[k] for k in ("z", "b", "y"))
        ready, free, rows_ready = smem["ready"], smem["free"], smem["rows_ready"]
        warpgroup = lax.axis_index("warpgroup")
        member, strip = locate_strip(lax.axis_index("strip"), strips)
        cols = pl.ds(strip * COLS, COLS)

        def rows(tile):
            # The start is traced (`strip * 0`), because a static slice must not exceed the array.
            # Past the last row TMA reads zeros and writes nothing.
            return pl.ds((strip * 0 + tile) * TILE_ROWS, TILE_ROWS)

        def fetch(warp, m):
            first = first_gmem[m][0]

            @pl.when(warp == WARPS - 1)
            def _fetch_rows():
                for tile, slice_ in itertools.product(range(tiles), range(slices)):
                    plgpu.copy_gmem_to_smem(
                        z_gmem.at[m, rows(tile), pl.ds(slice_ * TILE_K, TILE_K)],
                        z_smem.at[tile * slices + slice_],
                        rows_ready,
                    )

            def copy(slot, stage, box):
                plgpu.copy_gmem_to_smem(
                    b_gmem[m].at[slot, pl.ds(0, box), cols],
                    b_smem.at[stage, pl.ds(0, box)],
                    ready.at[stage],
                )

            fetch_slots(warp, plan_gmem, ranks_gmem[m], first, free, stages, sizes, copy)

        @pl.when(warpgroup == tiles)
        def _fetch():
            plgpu.warp_map(lambda warp: for_member(member, count, functools.partial(fetch, warp)))

        @pl.when(warpgroup < tiles)
        def _consume():
            clear(b_smem, warpgroup, tiles)
            lax.fori_loop(0, stages, lambda i, _: plgpu.barrier_arrive(free.at[i]), None)
            slot_indices = load_slot_indices(plan_gmem, warpgroup, sizes)
            plgpu.barrier_wait(rows_ready)

            def right(stage):
                return [b_smem.at[stage, pl.ds(i * TILE_K, TILE_K)] for i in range(slices)]

            my_slices = [warpgroup * slices + i for i in range(slices)]
            left = [(z_smem[i], smem.get("mask_buffer", z_smem).at[i]) for i in my_slices]
            sums = products(plan_gmem[0], slot_indices, left, right, ready, free, COLS)
            y_smem[warpgroup] = sums.astype(dtype)
            plgpu.commit_smem()

            def store(m):
                plgpu.copy_smem_to_gmem(y_smem.at[warpgroup], y_gmem[m].at[rows(warpgroup), cols])

            for_member(member, count, store)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((z.shape[1], m.lora_b.shape[2]), dtype) for m in members],
        grid=(sum(strips),),
        grid_names=("strip",),
        num_threads=tiles + 1,
        thread_name="warpgroup",
        scratch_types={
            "z": tiled((tiles * slices, TILE_ROWS, TILE_K), dtype),
            "b": tiled((stages, depth, COLS), dtype),
            "y": tiled((tiles, TILE_ROWS, COLS), dtype),
            "rows_ready": plgpu.Barrier(num_arrivals=tiles * slices),
            "ready": plgpu.Barrier(num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
        }
        | mask_buffer((tiles * slices, TILE_ROWS, TILE_K), dtype),
        kernel_name="dora_bank_rows_expand",
    )(z, plan, *itertools.chain(*operands))
