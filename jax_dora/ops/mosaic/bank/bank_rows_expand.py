"""The second kernel of `bank_rows`: each row's product with the B of its slot.

    z  [members, rows, depth]  bf16 or fp16, zero beyond the rank of the row's slot
    B  [slots, r, out]     y  [rows, out]     of each member

A thread block has 64 rows and 64 columns of one member, and loops over the slots in use.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.bank.bank_rows_sizes import TILE_ROWS, WARPS, Config, Member, Sizes
from jax_dora.ops.mosaic.bank.bank_rows_slots import (
    fetch_slots,
    for_member,
    load_slot_indices,
    locate_strip,
    mask_buffer,
    products,
)
from jax_dora.ops.mosaic.hopper.limits import TILE_K, tiled

COLS = 64


def launch(
    z: jax.Array, members: Sequence[Member], plan: jax.Array, sizes: Sizes, config: Config
) -> Sequence[jax.Array]:
    """Returns y of each member, for the padded rows of z; the other arguments are a `Call`'s."""
    stages, depth, dtype, count = config.expand_stages, sizes.depth, z.dtype, len(members)
    slices = depth // TILE_K
    strips = [m.lora_b.shape[2] // COLS for m in members]
    operands = [[getattr(m, name) for m in members] for name in ("first", "rank", "lora_b")]

    def kernel(z_gmem, plan_gmem, *rest, **smem):
        # Of each member: [1], [slots], [slots, r, out], [rows, out].
        first_gmem, ranks_gmem, b_gmem, y_gmem = itertools.batched(rest, count)
        z_smem, b_smem = smem["z"], smem["b"]
        ready, free, rows_ready = smem["ready"], smem["free"], smem["rows_ready"]
        tile, warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")
        member, strip = locate_strip(lax.axis_index("strip"), strips)
        cols = pl.ds(strip * COLS, COLS)
        # Past the last row TMA reads zeros and writes nothing.
        rows = pl.ds(tile * TILE_ROWS, TILE_ROWS)

        def fetch(warp, m):
            @pl.when(warp == WARPS - 1)
            def _fetch_rows():
                for i in range(slices):
                    plgpu.copy_gmem_to_smem(
                        z_gmem.at[m, rows, pl.ds(i * TILE_K, TILE_K)], z_smem.at[i], rows_ready
                    )

            def copy(slot, rank, stage):
                plgpu.copy_gmem_to_smem(
                    b_gmem[m].at[slot, sizes.ranks(rank), cols], b_smem.at[stage], ready.at[stage]
                )

            first = first_gmem[m][0]
            fetch_slots(warp, tile, plan_gmem, ranks_gmem[m], first, free, sizes, copy)

        @pl.when(warpgroup == 1)
        def _fetch():
            plgpu.warp_map(lambda warp: for_member(member, count, functools.partial(fetch, warp)))

        @pl.when(warpgroup == 0)
        def _consume():
            slot_indices = load_slot_indices(plan_gmem, tile, sizes)
            plgpu.barrier_wait(rows_ready)

            def right(stage):
                return [b_smem.at[stage, pl.ds(i * TILE_K, TILE_K)] for i in range(slices)]

            left = [(z_smem[i], smem.get("mask_buffer", z_smem).at[i]) for i in range(slices)]
            sums = products(plan_gmem[tile, 0], slot_indices, left, right, ready, free, COLS)
            # The tensor cores read z from registers, so its memory is free.
            y_smem = z_smem.at[0]
            y_smem[...] = sums.astype(dtype)
            plgpu.commit_smem()

            def store(m):
                plgpu.copy_smem_to_gmem(y_smem, y_gmem[m].at[rows, cols])

            for_member(member, count, store)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((z.shape[1], m.lora_b.shape[2]), dtype) for m in members],
        grid=(sum(strips), sizes.tiles),
        grid_names=("strip", "tile"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "z": tiled((slices, TILE_ROWS, TILE_K), dtype),
            "b": tiled((stages, depth, COLS), dtype),
            "rows_ready": plgpu.Barrier(num_arrivals=slices),
            "ready": plgpu.Barrier(num_barriers=stages),
            "free": plgpu.Barrier(num_barriers=stages),
        }
        | mask_buffer((slices, TILE_ROWS, TILE_K), dtype),
        kernel_name="dora_bank_rows_expand",
    )(z, plan, *itertools.chain(*operands))
