"""The product of groups of rows with the A of each group's slot, for prompts in a bank.

    z[n] = x[n] A[slot[n]]ᵀ

    x  [groups, time, in]  bf16 or fp16     A  [slots, r, in]  x's dtype     slot  i32[groups]
    z  f32[groups, time, r]

A is read from the bank, without a copy. The result has too few tiles to occupy the device, so the
contracted axis is split into parts. XLA adds the parts' results in a fixed order, fused with the
operations that follow.

Bytes: x, and for every 128 rows the A of their slot; the floor is bytes / copy rate.
FLOPs: 2 · groups · time · in · r.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper import limits, ring
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import (
    FETCH_REGISTERS,
    RESERVED,
    SHARED_MEMORY,
    TILE_K,
    consume_registers,
)

CONSUMERS = 2
# Each consumer issues one m64 wgmma per slice.
CONSUMER_ROWS = 64
TILE_ROWS = CONSUMERS * CONSUMER_ROWS
# The widest wgmma.
MOST_RANK = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning parameters.

    Attributes:
      stages: the number of pipeline stages, one slice of x and A each.
      parts: the number of parts of the contracted axis; None balances them over the
        multiprocessors.
    """

    stages: int = 6
    parts: int | None = None


def refuses(
    groups: int, time: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike
) -> str | None:
    """Returns why x [groups, time, in] and a bank of maximum rank `rank`, both of `dtype`, are not
    supported, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if groups == 0 or time == 0 or time % TILE_ROWS:
        return f"each row of the batch has {time} tokens, which is not a multiple of {TILE_ROWS}"
    if in_features == 0 or in_features % TILE_K:
        return f"in = {in_features} is not a multiple of {TILE_K}"
    if rank % limits.ALIGNMENT or not 0 < rank <= MOST_RANK:
        return f"the bank's maximum rank {rank} is not a multiple of 8 from 8 to {MOST_RANK}"
    return None


def wins(groups: int, time: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was faster than XLA, which copies the adapters of all rows (H100,
    `benchmarks bank`: prompts of 8 × 512 tokens, the projections of Llama 3 8B)."""
    return groups * time >= 1024 and in_features >= 4096


def config(
    groups: int, time: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike
) -> Config:
    """Returns a config with as many stages as fit into shared memory, at most the default."""
    out_bytes = TILE_ROWS * rank * 4
    stage_bytes = (TILE_ROWS + rank) * TILE_K * 2
    return Config(stages=min(Config.stages, (SHARED_MEMORY - RESERVED - out_bytes) // stage_bytes))


@launcher()
def launch(
    x: jax.Array, lora_a: jax.Array, slot: jax.Array, *, config: Config, sm_count: int
) -> jax.Array:
    """Returns z f32[groups, time, r]."""
    c, dtype = config, x.dtype
    groups, time, in_features = x.shape
    rank = lora_a.shape[1]
    rows, steps = groups * time, in_features // TILE_K
    tiles = rows // TILE_ROWS
    part = pl.cdiv(steps, c.parts or ring.parts(steps, tiles, sm_count))
    parts = pl.cdiv(steps, part)

    # x_gmem [rows, in], a_gmem [slots, r, in], slot_gmem [groups], parts_gmem [parts, rows, r]
    def body(x_gmem, a_gmem, slot_gmem, parts_gmem, *, x_smem, a_smem, out_smem, ready, free):
        unit, warpgroup = lax.axis_index("unit"), lax.axis_index("warpgroup")
        my_part, row = lax.rem(unit, parts), lax.div(unit, parts) * TILE_ROWS
        first = my_part * part
        my_steps = jnp.minimum(part, steps - first)

        @pl.when(warpgroup == CONSUMERS)
        def _fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            slot_a_gmem = a_gmem.at[slot_gmem[lax.div(row, jnp.int32(time))]]

            def copies(i, stage):
                at_rows, at_k = pl.ds(row, TILE_ROWS), pl.ds((first + i) * TILE_K, TILE_K)
                return (
                    (x_gmem.at[at_rows, at_k], x_smem.at[stage], ready.at[stage]),
                    (slot_a_gmem.at[:, at_k], a_smem.at[stage], ready.at[stage]),
                )

            ring.fetch(my_steps, copies, free)

        @pl.when(warpgroup < CONSUMERS)
        def _consume():
            plgpu.set_max_registers(consume_registers(CONSUMERS), action="increase")
            ring.release(free)
            my_rows = pl.ds(warpgroup * CONSUMER_ROWS, CONSUMER_ROWS)

            def multiply(acc_ref, stage, _):
                plgpu.barrier_wait(ready.at[stage])
                a_tile = a_smem.at[stage].transpose((1, 0))
                plgpu.wgmma(acc_ref, x_smem.at[stage, my_rows], a_tile)

            shape = CONSUMER_ROWS, rank
            out_smem[warpgroup] = ring.accumulate(my_steps, multiply, shape, free)
            plgpu.barrier_arrive(free.at[lax.rem(my_steps - 1, c.stages)])
            plgpu.commit_smem()
            at_rows = pl.ds(row + warpgroup * CONSUMER_ROWS, CONSUMER_ROWS)
            plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], parts_gmem.at[my_part, at_rows])
            plgpu.wait_smem_to_gmem(0)

    results = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, rows, rank), jnp.float32),
        grid=(tiles * parts,),
        grid_names=("unit",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "x_smem": limits.tiled((c.stages, TILE_ROWS, TILE_K), dtype),
            "a_smem": limits.tiled((c.stages, rank, TILE_K), dtype),
            "out_smem": limits.tiled((CONSUMERS, CONSUMER_ROWS, rank), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages),
        },
        kernel_name="dora_bank_shrink",
    )(x.reshape(rows, in_features), lora_a, slot)
    return results.sum(0).reshape(groups, time, rank)
