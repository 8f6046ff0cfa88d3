"""Each row's product with the B of its slot: the second kernel of `bank_few_rows`.

    parts  f32[splits, members, rows, 64], which add up to x A of each row's slot
    B  [slots, r, out]     y  [rows, out]  bf16 or fp16     of each member

A thread block has 64 columns of one member and goes through the slots in use. Past a slot's rank a
stage keeps what was there, which zeros of x A meet.
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
from jax_dora.ops.mosaic.bank_rows_sizes import WARPS, Member, Sizes
from jax_dora.ops.mosaic.bank_rows_slots import clear, for_box, for_one, strip_of
from jax_dora.ops.mosaic.few_rows_finish import PITCH

COLS = 64
DEPTH = 64


def launch(
    parts: jax.Array, members: Sequence[Member], plan: jax.Array, sizes: Sizes, config: Any
) -> Sequence[jax.Array]:
    """Returns y of each member, of as many rows as the parts have.

    Args:
      members: `first` being i32[1].
      config: as `bank_few_rows.config` returns it.
    """
    dtype = members[0].lora_b.dtype
    stages = min(config.expand_stages, pl.cdiv(sizes.in_use, WARPS) * WARPS)
    splits, count, held, _ = parts.shape
    strips = [one.lora_b.shape[2] // COLS for one in members]
    layout = few_rows_layout.layout(dtype)
    operands = [[getattr(one, name) for one in members] for name in ("first", "rank", "lora_b")]

    def kernel(parts_gmem, plan_gmem, *rest, smem, ready):
        first_gmem, rank_gmem, b_gmem, y_gmem = itertools.batched(rest, count)
        member, strip = strip_of(lax.axis_index("strip"), strips)
        cols = pl.ds(strip * COLS, COLS)

        def fetch(indices):
            """Fetches B of slots in use by their numbers."""

            def of_member(number):
                # All are looked up before anything waits for one.
                slots = [plan_gmem[1 + index] + first_gmem[number][0] for index in indices]
                ranks = [rank_gmem[number][slot] for slot in slots]
                for index, slot, rank in zip(indices, slots, ranks, strict=True):
                    stage = lax.rem(index, jnp.int32(stages))

                    def copy(box, slot=slot, stage=stage):
                        plgpu.copy_gmem_to_smem(
                            b_gmem[number].at[slot, pl.ds(0, box), cols],
                            smem["b"].at[stage, pl.ds(0, box)],
                            ready.at[stage],
                        )

                    @pl.when(index < in_use)
                    def _copy(rank=rank, copy=copy):
                        for_box(rank, sizes, copy)

            for_one(member, count, of_member)

        # Past a slot's rank zeros meet what a stage holds, which has to be finite.
        clear(smem["b"], 0, 1)
        in_use = plan_gmem[0]
        plgpu.warp_map(lambda warp: fetch([warp + turn * WARPS for turn in range(stages // WARPS)]))
        numbers = plgpu.load(
            plan_gmem.at[pl.ds(sizes.entries, held)], layout=layout.reduce(1), optimized=False
        )
        number = lax.broadcast_in_dim(numbers, (held, COLS), (0,))
        z = zero = plgpu.layout_cast(jnp.zeros((held, COLS), jnp.float32), layout)
        for split in range(splits):
            part = parts_gmem.at[split, member]
            z = z + plgpu.load(part, layout=layout, optimized=False)
        few_rows_layout.store(z.astype(dtype), smem["z"].at[:, pl.ds(0, DEPTH)], dtype)
        plgpu.commit_smem()

        def meet(index, sums):
            stage = lax.rem(index, jnp.int32(stages))
            plgpu.barrier_wait(ready.at[stage])
            found = few_rows_tile.multiplied(zero, smem["z"], smem["b"].at[stage])
            # Without it the copy engine overtakes what the lanes read.
            plgpu.commit_smem()
            pl.when(index + stages < in_use)(lambda: fetch([index + stages]))
            return jnp.where(number == index, found, sums)

        sums = lax.fori_loop(0, in_use, meet, zero)
        few_rows_layout.store(sums.astype(dtype), smem["y"], dtype)
        plgpu.commit_smem()

        def store(number):
            plgpu.copy_smem_to_gmem(smem["y"], y_gmem[number].at[:, cols])

        for_one(member, count, store)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((held, one.lora_b.shape[2]), dtype) for one in members],
        grid=(sum(strips),),
        grid_names=("strip",),
        scratch_types={
            "smem": {
                "z": plgpu.SMEM((held, PITCH), dtype),
                "b": few_rows_tile.swizzled((stages, DEPTH, COLS), dtype),
                "y": plgpu.SMEM((held, COLS), dtype),
            },
            "ready": plgpu.Barrier(num_barriers=stages),
        },
        kernel_name="dora_bank_few_rows_expand",
    )(parts, plan, *itertools.chain(*operands))
