"""Each row's product with the A of its slot, in parts: the first kernel of `bank_few_rows`.

    x  [rows, in]  bf16 or fp16     A  [slots, r, in] of each member, x's dtype
    parts  f32[splits, members, rows, 64], zeros beyond a slot's rank, anything in rows of the base

A thread block has the ranks of one slot in use, of one member, and a part of `in`; it multiplies
all rows, and writes those that are the slot's.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import few_rows_layout, few_rows_tile
from jax_dora.ops.mosaic.bank_rows_sizes import Member, Sizes
from jax_dora.ops.mosaic.bank_rows_slots import for_box, for_one, of_one
from jax_dora.ops.mosaic.hopper import TILE_K

# Ranks of a tile of A.
COLS = 64


def launch(
    x: jax.Array, members: Sequence[Member], plan: jax.Array, sizes: Sizes, config: Any
) -> jax.Array:
    """Returns the parts, of as many rows as x has.

    Args:
      members: `first` being i32[1].
      config: as `bank_few_rows.config` returns it.
    """
    held, dtype, count = x.shape[0], x.dtype, len(members)
    tiles = sizes.in_features // TILE_K
    most = pl.cdiv(tiles, config.splits)
    splits, stages = pl.cdiv(tiles, most), min(config.shrink_stages, most)
    layout = few_rows_layout.layout(dtype)
    operands = [[getattr(one, name) for one in members] for name in ("first", "rank", "lora_a")]

    def kernel(x_gmem, plan_gmem, *rest, smem, ready, planned):
        *rest, parts_gmem = rest
        first_gmem, rank_gmem, a_gmem = itertools.batched(rest, count)
        split, member, index = (lax.axis_index(name) for name in ("split", "member", "index"))
        # All of it is read before anything waits for it.
        in_use = plan_gmem[0]
        slot = plan_gmem[1 + index] + of_one(member, [one[0] for one in first_gmem])
        rank = of_one(member, [one[slot] for one in rank_gmem])
        begin = split * most
        length = jnp.minimum(most, tiles - begin)

        def fetch(tile):
            stage = lax.rem(tile, jnp.int32(stages))
            at_k = pl.ds((begin + tile) * TILE_K, TILE_K)
            plgpu.copy_gmem_to_smem(x_gmem.at[:, at_k], smem["x"].at[stage], ready.at[stage])

            def fetch_a(number):
                def copy(box):
                    plgpu.copy_gmem_to_smem(
                        a_gmem[number].at[slot, pl.ds(0, box), at_k],
                        smem["a"].at[stage, pl.ds(0, box)],
                        ready.at[stage],
                    )

                for_box(rank, sizes, copy)

            for_one(member, count, fetch_a)

        def add(tile, total):
            stage = lax.rem(tile, jnp.int32(stages))
            plgpu.barrier_wait(ready.at[stage])
            total = few_rows_tile.multiplied(
                total, smem["x"].at[stage], smem["a"].at[stage], transposed_w=True
            )
            if most > stages:
                # Without it the copy engine overtakes what the lanes read.
                plgpu.commit_smem()
                pl.when(tile + stages < length)(lambda: fetch(tile + stages))
            return total

        @pl.when(index < in_use)
        def _multiply():
            owners_gmem = plan_gmem.at[pl.ds(sizes.entries, held)]
            plgpu.copy_gmem_to_smem(owners_gmem, smem["owners"], planned)
            lax.fori_loop(0, jnp.minimum(length, stages), lambda tile, _: fetch(tile), None)
            zero = plgpu.layout_cast(jnp.zeros((held, COLS), jnp.float32), layout)
            total = lax.fori_loop(0, length, add, zero)
            column = plgpu.broadcasted_iota(jnp.int32, total.shape, 1, layout=layout)
            total = jnp.where(column < rank, total, 0.0)
            few_rows_layout.store(total, smem["out"], dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(planned)

            def write(row, _):
                @pl.when(smem["owners"][row] == index)
                def _copy():
                    some = pl.ds(row, 1)
                    to_gmem = parts_gmem.at[split, member, some]
                    plgpu.copy_smem_to_gmem(smem["out"].at[some], to_gmem)

            lax.fori_loop(0, held, write, None)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, count, held, COLS), jnp.float32),
        grid=(splits, count, sizes.in_use),
        grid_names=("split", "member", "index"),
        scratch_types={
            "smem": {
                "x": few_rows_tile.swizzled((stages, held, TILE_K), dtype),
                "a": few_rows_tile.swizzled((stages, COLS, TILE_K), dtype),
                "out": plgpu.SMEM((held, COLS), jnp.float32),
                "owners": plgpu.SMEM((held,), jnp.int32),
            },
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "planned": plgpu.Barrier(),
        },
        kernel_name="dora_bank_few_rows_shrink",
    )(x, plan, *itertools.chain(*operands))
