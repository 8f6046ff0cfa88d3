"""The first kernel of `bank_rows`: partial sums of each row's product with the A of its slot.

    x  [rows, in]  bf16 or fp16     A  [slots, r, in] of each member
    parts  f32[in / 64 / slices, members, rows, depth]; zeros beyond the rank of a row's slot

A thread block has 64 rows, and `slices` tiles of 64 input features of one member. It keeps these
tiles of x and loops over the slots in use.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.bank.bank_rows_sizes import TILE_ROWS, WARPS, Config, Member, Sizes
from jax_dora.ops.mosaic.bank.bank_rows_slots import (
    fetch_slots,
    for_member,
    load_slot_indices,
    mask_buffer,
    products,
)
from jax_dora.ops.mosaic.hopper.limits import TILE_K, tiled


def launch(
    x: jax.Array,
    members: Sequence[Member],
    plan: jax.Array,
    sizes: Sizes,
    config: Config,
) -> jax.Array:
    """Returns the parts, for the padded rows of x; the arguments are a `Call`'s."""
    c, depth, dtype, count = config, sizes.depth, x.dtype, len(members)
    stages = c.shrink_stages
    chunks = pl.cdiv(sizes.in_features // TILE_K, c.slices)
    operands = [[getattr(m, name) for m in members] for name in ("first", "rank", "lora_a")]

    def kernel(x_gmem, plan_gmem, *rest, **smem):
        *rest, parts_gmem = rest
        # Of each member: [1], [slots], [slots, r, in].
        first_gmem, ranks_gmem, a_gmem = itertools.batched(rest, count)
        x_smem, ready, free = (smem[k] for k in ("x", "ready", "free"))
        a_smem, out_smem = smem["a_or_out"]
        chunk, member, tile = (lax.axis_index(name) for name in ("chunk", "member", "tile"))
        warpgroup = lax.axis_index("warpgroup")
        # Past the last row TMA reads zeros and writes nothing.
        rows = pl.ds(tile * TILE_ROWS, TILE_ROWS)

        def columns(slice_):
            return pl.ds((chunk * c.slices + slice_) * TILE_K, TILE_K)

        def fetch(warp, m):
            @pl.when(warp == WARPS - 1)
            def _fetch_x():
                for i in range(c.slices):
                    plgpu.copy_gmem_to_smem(
                        x_gmem.at[rows, columns(i)], x_smem.at[i], smem["x_ready"]
                    )

            def copy(slot, rank, stage):
                for i in range(c.slices):
                    plgpu.copy_gmem_to_smem(
                        a_gmem[m].at[slot, sizes.ranks(rank), columns(i)],
                        a_smem.at[stage * c.slices + i],
                        ready.at[stage],
                    )

            first = first_gmem[m][0]
            fetch_slots(warp, tile, plan_gmem, ranks_gmem[m], first, free, sizes, copy)

        @pl.when(warpgroup == 1)
        def _fetch():
            plgpu.warp_map(lambda warp: for_member(member, count, functools.partial(fetch, warp)))

        @pl.when(warpgroup == 0)
        def _consume():
            slot_indices = load_slot_indices(plan_gmem, tile, sizes)
            plgpu.barrier_wait(smem["x_ready"])

            def right(stage):
                return [a_smem.at[stage * c.slices + i].transpose((1, 0)) for i in range(c.slices)]

            left = [(x_smem[i], smem.get("mask_buffer", x_smem).at[i]) for i in range(c.slices)]
            sums = products(plan_gmem[tile, 0], slot_indices, left, right, ready, free, depth)
            # All warps wait until the tensor cores have read the last stage, whose memory `out`
            # reuses.
            plgpu.commit_smem()
            out_smem[...] = sums
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, parts_gmem.at[chunk, member, rows])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((chunks, count, x.shape[0], depth), jnp.float32),
        grid=(chunks, count, sizes.tiles),
        grid_names=("chunk", "member", "tile"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "x": tiled((c.slices, TILE_ROWS, TILE_K), dtype),
            "x_ready": plgpu.Barrier(num_arrivals=c.slices),
            "a_or_out": plgpu.RefUnion(
                tiled((stages * c.slices, depth, TILE_K), dtype),
                tiled((TILE_ROWS, depth), jnp.float32),
            ),
            "ready": plgpu.Barrier(num_arrivals=c.slices, num_barriers=stages),
            "free": plgpu.Barrier(num_barriers=stages),
        }
        | mask_buffer((c.slices, TILE_ROWS, TILE_K), dtype),
        kernel_name="dora_bank_rows_shrink",
    )(x, plan, *itertools.chain(*operands))
