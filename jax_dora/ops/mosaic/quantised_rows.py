"""The product of one or two rows with a kernel of 8 bits: y = x (σ∘q).

    x  [rows, in]  bf16 or fp16                   σ  f32[in / t, out], t = in or a multiple of 64
    q  [in, out]  int8 or float8_e4m3fn           y  [rows, out]  x's dtype

So few rows leave the tensor cores idle: a tile's numbers are converted in registers and multiplied
there by their row of each x, in fp32, and nothing goes back to shared memory. A consumer, a
warpgroup, keeps the sums of its tiles in registers, adds them over the rows of a tile at the end of
a run and stores them; XLA adds what consumers and runs have stored, in a fixed order.

Bytes: q and σ once, which set the floor.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import quantised_product
from jax_dora.ops.mosaic.hopper import consume_registers, pad, tiled
from jax_dora.ops.mosaic.launch import launcher
from jax_dora.ops.mosaic.low_rank_tiling import TILE_ROWS, Config, Tiling, Walk
from jax_dora.ops.mosaic.quantised_product import fetch, slot_of
from jax_dora.ops.quantised import Format, repeated

MOST_ROWS = 2
# The dtype of 16 bits that holds a format's numbers, on their way to fp32.
THROUGH = {"int8": jnp.bfloat16, "float8_e4m3fn": jnp.float16}
# Four columns a thread: a word of shared memory.
LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


def refuses(
    rows: int, in_features: int, out: int, form: Format, dtype: jax.typing.DTypeLike
) -> str | None:
    """Returns why x [rows, in] of `dtype` and q [in, out] of a format are not taken, or None."""
    if rows > MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    if form.qtype not in THROUGH:
        return f"the kernel's format is {form}, none of {', '.join(THROUGH)}"
    return quantised_product.refuses(rows, in_features, out, form, dtype)


def wins(rows: int, in_features: int, out: int, form: Format, dtype: Any) -> bool:
    """Returns whether the kernel is taken to be no slower than that of more rows, or XLA.

    8192 × 8192 on an H200: one row 27 µs over int8 and 25 over float8_e4m3fn, where the other
    kernel takes 39 and 38; two rows 34 and 28.
    """
    return quantised_product.wins(rows, in_features, out, form, dtype)


def config(rows: int, in_features: int, out: int, form: Format, dtype: Any) -> Config:
    """Returns the launch knobs for a call that is not refused."""
    return Config(tile_cols=128, slots=6, consumers=2)


@launcher()
def launch(
    x: jax.Array, qvalue: jax.Array, scales: jax.Array, *, config: Config, sm_count: int
) -> jax.Array:
    """Returns [..., out] for x [..., in], qvalue [in, out] and scales [in / t, out / u]."""
    shape, dtype, c = x.shape, x.dtype, config
    in_features, out = qvalue.shape
    x = x.reshape(-1, in_features)
    rows = x.shape[0]
    tiling = Tiling(in_features, out, c, sm_count)
    scales = repeated(scales.astype(jnp.float32), 1, out)
    of_tiles = [] if scales.shape[0] == 1 else [pad(scales, len(scales), tiling.padded_out)]
    scale_tiles = tiling.row_tiles // scales.shape[0]
    through = THROUGH[jnp.dtype(qvalue.dtype).name]
    ring = c.consumers * c.slots

    def kernel(x_gmem, q_gmem, *rest, x_smem, q_smem, scales_smem, sums_smem, barriers):
        *scales_gmem, out_gmem = rest
        ready, free, turn_of = barriers["ready"], barriers["free"], barriers["turn"]
        walk = Walk(tiling, lax.axis_index("block"))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == c.consumers)
        def _fetch():
            def of_run(_, cols, first):
                def copy(slot, at_k, tile):
                    plgpu.copy_gmem_to_smem(q_gmem.at[at_k, cols], q_smem.at[slot], ready.at[slot])
                    for row in range(rows):
                        plgpu.copy_gmem_to_smem(
                            x_gmem.at[row, at_k], x_smem.at[slot, row], ready.at[slot]
                        )
                    for one in scales_gmem:
                        plgpu.copy_gmem_to_smem(
                            one.at[lax.div(first + tile, scale_tiles), cols],
                            scales_smem.at[slot],
                            ready.at[slot],
                        )

                return copy

            fetch(walk, c, free, of_run)

        @pl.when(warpgroup < c.consumers)
        def _consume():
            plgpu.set_max_registers(consume_registers(c.consumers), action="increase")
            for slot in range(c.slots):
                plgpu.barrier_arrive(free.at[warpgroup * c.slots + slot])

            def consume_run(index, before):
                cols, split, _, tiles = walk.run(index)
                skipped, turns = walk.turns(warpgroup, before, tiles, c.consumers)

                def add(i, sums):
                    slot = slot_of(before + skipped + i * c.consumers, c)
                    plgpu.barrier_wait(ready.at[slot])
                    value = plgpu.load(q_smem.at[slot], layout=LAYOUT)
                    value = value.astype(through).astype(jnp.float32)
                    if of_tiles:
                        scale = plgpu.load(scales_smem.at[slot], layout=LAYOUT.reduce(0))
                        value = value * lax.broadcast_in_dim(scale, value.shape, (1,))
                    added = []
                    for row, total in enumerate(sums):
                        factor = plgpu.load(
                            x_smem.at[slot, row], layout=LAYOUT.reduce(1), optimized=False
                        )
                        factor = lax.broadcast_in_dim(factor.astype(jnp.float32), value.shape, (0,))
                        added.append(total + value * factor)
                    plgpu.barrier_arrive(free.at[slot])
                    return tuple(added)

                zero = plgpu.layout_cast(jnp.zeros((TILE_ROWS, c.tile_cols), jnp.float32), LAYOUT)
                sums = lax.fori_loop(0, turns, add, (zero,) * rows)
                # Warpgroups have one piece of memory for sums over their warps.
                plgpu.barrier_wait(turn_of.at[warpgroup])
                for row, total in enumerate(sums):
                    sums_smem[warpgroup, row] = jnp.sum(total, axis=0)
                plgpu.barrier_arrive(turn_of.at[lax.rem(warpgroup + 1, c.consumers)])
                plgpu.commit_smem()
                for row in range(rows):
                    plgpu.copy_smem_to_gmem(
                        sums_smem.at[warpgroup, row],
                        out_gmem.at[split * c.consumers + warpgroup, row, cols],
                    )
                # The next run writes there.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                return before + tiles

            @pl.when(warpgroup == 0)
            def _give_first_turn():
                plgpu.barrier_arrive(turn_of.at[0])

            lax.fori_loop(0, walk.runs, consume_run, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

            @pl.when(warpgroup == 0)
            def _take_last_turn():
                plgpu.barrier_wait(turn_of.at[0])

    sums = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(
            (tiling.splits * c.consumers, rows, tiling.padded_out), jnp.float32
        ),
        grid=(tiling.blocks,),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        scratch_types={
            "x_smem": plgpu.SMEM((ring, rows, TILE_ROWS), dtype),
            "q_smem": tiled((ring, TILE_ROWS, c.tile_cols), qvalue.dtype, out),
            "scales_smem": plgpu.SMEM((ring, c.tile_cols), jnp.float32),
            "sums_smem": plgpu.SMEM((c.consumers, rows, c.tile_cols), jnp.float32),
            "barriers": {
                "ready": plgpu.Barrier(num_arrivals=1 + rows + len(of_tiles), num_barriers=ring),
                "free": plgpu.Barrier(num_barriers=ring),
                "turn": plgpu.Barrier(num_barriers=c.consumers),
            },
        },
        kernel_name="dora_quantised_rows",
    )(x, qvalue, *of_tiles)
    y = jnp.sum(sums, axis=0)[:, :out]
    y = y if of_tiles else y * scales
    return y.astype(dtype).reshape(*shape[:-1], out)
