"""The first kernel of `bank_rows`: partial sums of each row's product with the A of its slot.

    x  [rows, in]  bf16 or fp16     A  [slots, r, in] of each member
    parts  f32[in / 64 / slices, members, rows, r]

A thread block has `slices` tiles of 64 input features of one member. It keeps these tiles of x and
loops over the slots in use. Columns of `parts` beyond the rank of a row's slot are arbitrary: they
come from other slots.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.bank_rows_sizes import TILE_ROWS, WARPS, Config, Member, Sizes, padded
from jax_dora.ops.mosaic.bank_rows_slots import (
    clear,
    fetch_slots,
    for_member,
    load_slot_indices,
    mask_buffer,
    products,
)
from jax_dora.ops.mosaic.hopper import TILE_K, tiled


def launch(
    x: jax.Array,
    members: Sequence[Member],
    plan: jax.Array,
    sizes: Sizes,
    config: Config,
) -> jax.Array:
    """Returns the parts, for the padded rows of x; the arguments are a `Call`'s."""
    c, tiles, dtype, count = config, sizes.tiles, x.dtype, len(members)
    stages = c.shrink_stages
    chunks = pl.cdiv(sizes.in_features // TILE_K, c.slices)
    operands = [[getattr(m, name) for m in members] for name in ("first", "rank", "lora_a")]

    def kernel(x_gmem, plan_gmem, *rest, **smem):
        *rest, parts_gmem = rest
        # Of each member: [1], [slots], [slots, r, in].
        first_gmem, ranks_gmem, a_gmem = itertools.batched(rest, count)
        x_smem, a_smem, out_smem = (smem[k] for k in ("x", "a", "out"))
        ready, free = smem["ready"], smem["free"]
        chunk, warpgroup = lax.axis_index("chunk"), lax.axis_index("warpgroup")
        member = lax.axis_index("member")

        def columns(slice_):
            return pl.ds((chunk * c.slices + slice_) * TILE_K, TILE_K)

        def rows(tile):
            # The start is traced (`chunk * 0`), because a static slice must not exceed the array.
            # Past the last row TMA reads zeros and writes nothing.
            return pl.ds((chunk * 0 + tile) * TILE_ROWS, TILE_ROWS)

        def fetch(warp, m):
            first, rank_gmem = first_gmem[m][0], ranks_gmem[m]

            @pl.when(warp == WARPS - 1)
            def _fetch_x():
                for tile, slice_ in itertools.product(range(tiles), range(c.slices)):
                    plgpu.copy_gmem_to_smem(
                        x_gmem.at[rows(tile), columns(slice_)],
                        x_smem.at[tile * c.slices + slice_],
                        smem["x_ready"],
                    )

            def copy(slot, stage, box):
                for slice_ in range(c.slices):
                    plgpu.copy_gmem_to_smem(
                        a_gmem[m].at[slot, pl.ds(0, box), columns(slice_)],
                        a_smem.at[stage * c.slices + slice_, pl.ds(0, box)],
                        ready.at[stage],
                    )

            fetch_slots(warp, plan_gmem, rank_gmem, first, free, stages, sizes, copy)

        @pl.when(warpgroup == tiles)
        def _fetch():
            plgpu.warp_map(lambda warp: for_member(member, count, functools.partial(fetch, warp)))

        @pl.when(warpgroup < tiles)
        def _consume():
            clear(a_smem, warpgroup, tiles)
            lax.fori_loop(0, stages, lambda i, _: plgpu.barrier_arrive(free.at[i]), None)
            slot_indices = load_slot_indices(plan_gmem, warpgroup, sizes)
            plgpu.barrier_wait(smem["x_ready"])

            def right(stage):
                ranks = pl.ds(0, sizes.rank)
                return [
                    a_smem.at[stage * c.slices + i, ranks].transpose((1, 0))
                    for i in range(c.slices)
                ]

            my_slices = [warpgroup * c.slices + i for i in range(c.slices)]
            left = [(x_smem[i], smem.get("mask_buffer", x_smem).at[i]) for i in my_slices]
            sums = products(plan_gmem[0], slot_indices, left, right, ready, free, sizes.rank)
            out_smem[warpgroup] = sums
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_smem.at[warpgroup], parts_gmem.at[chunk, member, rows(warpgroup)]
            )
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((chunks, count, x.shape[0], sizes.rank), jnp.float32),
        grid=(chunks, count),
        grid_names=("chunk", "member"),
        num_threads=tiles + 1,
        thread_name="warpgroup",
        scratch_types={
            "x": tiled((tiles * c.slices, TILE_ROWS, TILE_K), dtype),
            "x_ready": plgpu.Barrier(num_arrivals=tiles * c.slices),
            "a": tiled((stages * c.slices, padded(sizes.rank), TILE_K), dtype),
            "out": tiled((tiles, TILE_ROWS, sizes.rank), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=c.slices, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
        }
        | mask_buffer((tiles * c.slices, TILE_ROWS, TILE_K), dtype),
        kernel_name="dora_bank_rows_shrink",
    )(x, plan, *itertools.chain(*operands))
