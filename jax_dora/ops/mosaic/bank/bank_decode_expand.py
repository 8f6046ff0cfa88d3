"""The second kernel of `bank_decode`: each row's product with the B of its slot.

    parts  f32[splits, members, rows, 64], Σ_splits parts = x A of each row's slot
    B  [slots, r, out]     y  [rows, out]  bf16 or fp16     of each member

A thread block has 64 columns of one member and loops over the slots in use.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.bank.bank_rows_sizes import WARPS, Member, Sizes
from jax_dora.ops.mosaic.bank.bank_rows_slots import for_member, locate_strip
from jax_dora.ops.mosaic.decode import decode_layout, decode_tile
from jax_dora.ops.mosaic.decode.decode_finish import PITCH

COLS = 64
DEPTH = 64


def launch(
    parts: jax.Array, members: Sequence[Member], plan: jax.Array, sizes: Sizes
) -> Sequence[jax.Array]:
    """Returns y of each member, for the padded rows of the parts.

    Args:
      parts: the result of `bank_decode_shrink`.
      members, plan, sizes: see `bank_rows_sizes.Call`.
    """
    dtype = members[0].lora_b.dtype
    # Every slot in use has a stage of its own.
    turns = pl.cdiv(sizes.in_use, WARPS)
    splits, count, rows, _ = parts.shape
    strips = [m.lora_b.shape[2] // COLS for m in members]
    layout = decode_layout.layout(COLS)
    operands = [[getattr(m, name) for m in members] for name in ("first", "rank", "lora_b")]

    def kernel(parts_gmem, plan_gmem, *rest, smem, ready):
        # Of each member: [1], [slots], [slots, r, out], [rows, out].
        first_gmem, rank_gmem, b_gmem, y_gmem = itertools.batched(rest, count)
        member, strip = locate_strip(lax.axis_index("strip"), strips)
        cols = pl.ds(strip * COLS, COLS)

        def fetch(warp, m):
            """Fetches the B of every `WARPS`-th slot in use."""
            indices = [warp + turn * WARPS for turn in range(turns)]
            # These loads are all issued before the first of them is waited for.
            slots = [plan_gmem[0, 1 + index] + first_gmem[m][0] for index in indices]
            ranks = [rank_gmem[m][slot] for slot in slots]
            for index, slot, rank in zip(indices, slots, ranks, strict=True):

                @pl.when(index < in_use)
                def _copy(index=index, slot=slot, rank=rank):
                    plgpu.copy_gmem_to_smem(
                        b_gmem[m].at[slot, sizes.ranks(rank), cols],
                        smem["b"].at[index],
                        ready.at[index],
                    )

        in_use = plan_gmem[0, 0]
        plgpu.warp_map(lambda warp: for_member(member, count, functools.partial(fetch, warp)))
        slot_indices = plgpu.load(
            plan_gmem.at[0, pl.ds(sizes.entries, rows)], layout=layout.reduce(1), optimized=False
        )
        slot_indices = lax.broadcast_in_dim(slot_indices, (rows, COLS), (0,))
        z = zero = plgpu.layout_cast(jnp.zeros((rows, COLS), jnp.float32), layout)
        for split in range(splits):
            part = parts_gmem.at[split, member]
            z = z + plgpu.load(part, layout=layout, optimized=False)
        decode_layout.store(z.astype(dtype), smem["z"].at[:, pl.ds(0, DEPTH)])
        plgpu.commit_smem()

        def multiply_slot(index, sums):
            plgpu.barrier_wait(ready.at[index])
            product = decode_tile.accumulate(zero, smem["z"], smem["b"].at[index])
            return jnp.where(slot_indices == index, product, sums)

        sums = lax.fori_loop(0, in_use, multiply_slot, zero)
        decode_layout.store(sums.astype(dtype), smem["y"])
        plgpu.commit_smem()

        def store(m):
            plgpu.copy_smem_to_gmem(smem["y"], y_gmem[m].at[:, cols])

        for_member(member, count, store)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((rows, m.lora_b.shape[2]), dtype) for m in members],
        grid=(sum(strips),),
        grid_names=("strip",),
        scratch_types={
            "smem": {
                "z": plgpu.SMEM((rows, PITCH), dtype),
                "b": decode_tile.swizzled((turns * WARPS, DEPTH, COLS), dtype),
                "y": plgpu.SMEM((rows, COLS), dtype),
            },
            "ready": plgpu.Barrier(num_barriers=turns * WARPS),
        },
        kernel_name="dora_bank_decode_expand",
    )(parts, plan, *itertools.chain(*operands))
