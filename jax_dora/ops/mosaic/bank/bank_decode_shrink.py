"""The first kernel of `bank_decode`: partial sums of each row's product with the A of its slot.

    x  [rows, in]  bf16 or fp16     A  [slots, r, in] of each member, x's dtype
    parts  f32[splits, members, rows, 64]; zeros beyond a slot's rank, arbitrary in rows of the base

A thread block has one slot in use of one member, and a part of `in`. It multiplies all rows by the
slot's A, and writes the rows that use this slot.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.bank.bank_rows_sizes import Member, Sizes
from jax_dora.ops.mosaic.bank.bank_rows_slots import for_member, select_member
from jax_dora.ops.mosaic.decode import decode_layout, decode_tile
from jax_dora.ops.mosaic.hopper.limits import TILE_K

# The rank of a tile of A.
COLS = 64


def launch(
    x: jax.Array, members: Sequence[Member], plan: jax.Array, sizes: Sizes, config: Any
) -> jax.Array:
    """Returns the parts, for the padded rows of x.

    Args:
      x, members, plan, sizes: see `bank_rows_sizes.Call`.
      config: a `bank_decode.Config`.
    """
    rows, dtype, count = x.shape[0], x.dtype, len(members)
    tiles = sizes.in_features // TILE_K
    split_tiles = pl.cdiv(tiles, config.splits)
    splits, stages = pl.cdiv(tiles, split_tiles), min(config.shrink_stages, split_tiles)
    layout = decode_layout.layout(COLS)
    operands = [[getattr(m, name) for m in members] for name in ("first", "rank", "lora_a")]

    def kernel(x_gmem, plan_gmem, *rest, smem, ready, planned):
        *rest, parts_gmem = rest
        # Of each member: [1], [slots], [slots, r, in].
        first_gmem, rank_gmem, a_gmem = itertools.batched(rest, count)
        split, member, index = (lax.axis_index(name) for name in ("split", "member", "index"))
        # These loads are all issued before the first of them is waited for.
        in_use = plan_gmem[0, 0]
        slot = plan_gmem[0, 1 + index] + select_member(member, [ref[0] for ref in first_gmem])
        rank = select_member(member, [ref[slot] for ref in rank_gmem])
        begin = split * split_tiles
        length = jnp.minimum(split_tiles, tiles - begin)

        def fetch(tile):
            stage = lax.rem(tile, jnp.int32(stages))
            at_k = pl.ds((begin + tile) * TILE_K, TILE_K)
            plgpu.copy_gmem_to_smem(x_gmem.at[:, at_k], smem["x"].at[stage], ready.at[stage])

            def fetch_a(m):
                plgpu.copy_gmem_to_smem(
                    a_gmem[m].at[slot, sizes.ranks(rank), at_k],
                    smem["a"].at[stage],
                    ready.at[stage],
                )

            for_member(member, count, fetch_a)

        def add(tile, total):
            stage = lax.rem(tile, jnp.int32(stages))
            plgpu.barrier_wait(ready.at[stage])
            total = decode_tile.accumulate(
                total, smem["x"].at[stage], smem["a"].at[stage], transposed_w=True
            )
            if split_tiles > stages:
                # This fence keeps the next TMA copy from overwriting the tile while lanes still
                # read it.
                plgpu.commit_smem()
                pl.when(tile + stages < length)(lambda: fetch(tile + stages))
            return total

        @pl.when(index < in_use)
        def _multiply():
            indices_gmem = plan_gmem.at[0, pl.ds(sizes.entries, rows)]
            plgpu.copy_gmem_to_smem(indices_gmem, smem["slot_indices"], planned)
            lax.fori_loop(0, jnp.minimum(length, stages), lambda tile, _: fetch(tile), None)
            zero = plgpu.layout_cast(jnp.zeros((rows, COLS), jnp.float32), layout)
            total = lax.fori_loop(0, length, add, zero)
            decode_layout.store(total, smem["out"])
            plgpu.commit_smem()
            plgpu.barrier_wait(planned)

            def write(row, _):
                @pl.when(smem["slot_indices"][row] == index)
                def _copy():
                    at_row = pl.ds(row, 1)
                    to_gmem = parts_gmem.at[split, member, at_row]
                    plgpu.copy_smem_to_gmem(smem["out"].at[at_row], to_gmem)

            lax.fori_loop(0, rows, write, None)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, count, rows, COLS), jnp.float32),
        grid=(splits, count, sizes.in_use),
        grid_names=("split", "member", "index"),
        scratch_types={
            "smem": {
                "x": decode_tile.swizzled((stages, rows, TILE_K), dtype),
                "a": decode_tile.swizzled((stages, COLS, TILE_K), dtype),
                "out": plgpu.SMEM((rows, COLS), jnp.float32),
                "slot_indices": plgpu.SMEM((rows,), jnp.int32),
            },
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "planned": plgpu.Barrier(),
        },
        kernel_name="dora_bank_decode_shrink",
    )(x, plan, *itertools.chain(*operands))
