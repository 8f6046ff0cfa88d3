"""The product of few rows with a quantised kernel: y = x (σ∘v(q)).

    x  [rows, in]  bf16 or fp16                   σ  [in / t, out], t = in or a multiple of 64
    q  [in, out]  int4, uint4 of NF4, int8 or float8_e4m3fn          y  [rows, out]  x's dtype

v takes codes to the numbers that they stand for, rounded to x's dtype, by a table (`quantised_tile`
multiplies a tile). Scales are applied in fp32: of tiles to a tile's sums, of whole columns to the
result. A strip is as wide as a row of 128 bytes; each consumer, a warpgroup, has runs and a ring of
tiles of its own, and a warp that fetches them. What runs of a strip have summed up XLA adds, in a
fixed order. More than `PASS_ROWS` rows take several passes.

Bytes: q and σ once a pass, which set the floor; x and the sums are in the level-2 cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import codebook, quantised_tile
from jax_dora.ops.mosaic.hopper import FETCH_REGISTERS, consume_registers, pad
from jax_dora.ops.mosaic.launch import launcher
from jax_dora.ops.mosaic.low_rank_tiling import TILE_ROWS, Config, Tiling, Walk
from jax_dora.ops.mosaic.quantised_tile import ROWS
from jax_dora.ops.quantised import Format, bits, repeated

MOST_ROWS = 64
# Rows of a pass, by the bits of a code: a thread's sums of 8 bits take half as many registers.
PASS_ROWS = {4: 32, 8: 64}
# Rows that are copied as they are; more are padded to whole instructions.
LOOSE_ROWS = 2


def refuses(
    rows: int, in_features: int, out: int, form: Format, dtype: jax.typing.DTypeLike
) -> str | None:
    """Returns why x [rows, in] of `dtype` and q [in, out] of a format are not taken, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    if form.has_zero_point:
        return f"the kernel's format is {form} with zero points"
    if in_features == 0 or in_features % TILE_ROWS:
        return f"in = {in_features} is not a multiple of {TILE_ROWS}"
    if form.tile[0] % TILE_ROWS:
        return f"the kernel's format is {form}; a tile's rows must be a multiple of {TILE_ROWS}"
    width = quantised_tile.TILE_BYTES * form.packed
    if out == 0 or out % width:
        return f"out = {out} is not a multiple of {width}"
    return None


def wins(rows: int, in_features: int, out: int, form: Format, dtype: Any) -> bool:
    """Returns whether the kernel is taken to be no slower than XLA, which copies the kernel in
    x's dtype before it multiplies.

    8192 × 8192 on an H200, in µs, with scales of fp32: over nf4 in tiles of 64 one row takes 13,
    8 rows 14, 32 rows 22 and 64 rows 42; over int8 20, 21 and 27, up to 32 rows.
    """
    return in_features >= 1024 and out >= 1024


def config(rows: int, in_features: int, out: int, form: Format, dtype: Any) -> Config:
    """Returns the launch knobs for a call that is not refused."""
    width = quantised_tile.TILE_BYTES * form.packed
    return Config(tile_cols=width, slots=4 if rows <= 32 or form.packed == 2 else 3, consumers=2)


@launcher()
def launch(
    x: jax.Array, qvalue: jax.Array, scales: jax.Array, *, config: Config, sm_count: int
) -> jax.Array:
    """Returns [..., out] for x [..., in], qvalue [in, out] and scales [in / t, out / u]."""
    shape, (in_features, out) = x.shape, qvalue.shape
    x = x.reshape(-1, in_features)
    scales = repeated(scales, 1, out)
    of_tiles = scales if scales.shape[0] > 1 else None
    tiling = Tiling(in_features, out, config, sm_count * config.consumers)
    rows = PASS_ROWS[bits(qvalue.dtype)]
    passes = [
        _sums(x[first : first + rows], qvalue, of_tiles, tiling)
        for first in range(0, x.shape[0], rows)
    ]
    y = passes[0] if len(passes) == 1 else jnp.concatenate(passes)
    y = y * scales.astype(jnp.float32) if of_tiles is None else y
    return y.astype(x.dtype).reshape(*shape[:-1], out)


def _sums(x: jax.Array, qvalue: jax.Array, scales: jax.Array | None, tiling: Tiling) -> jax.Array:
    """Returns f32[rows, out], x (scales∘v(qvalue)) for x [rows, in].

    Args:
      tiling: of as many multiprocessors as there are consumers.
    """
    c, dtype, (rows, in_features) = tiling.config, x.dtype, x.shape
    held = pl.cdiv(rows, ROWS) * ROWS
    copied = rows if rows <= LOOSE_ROWS else held
    x = pad(x, copied, in_features)
    of_tiles = [] if scales is None else [scales]
    scale_tiles = 0 if scales is None else tiling.row_tiles // scales.shape[0]
    scale_dtype = jnp.float32 if scales is None else scales.dtype
    table = jnp.asarray(quantised_tile.table(codebook.numbers(qvalue.dtype), dtype))
    layout = quantised_tile.layout(qvalue.dtype)
    ring = c.consumers * c.slots

    def kernel(x_gmem, q_gmem, table_gmem, *rest, buffers, ready, free, table_ready):
        *scales_gmem, out_gmem = rest
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

        def walk_of(consumer):
            return Walk(tiling, block * c.consumers + consumer)

        def slot_of(consumer, tile):
            return consumer * c.slots + lax.rem(tile, c.slots)

        def fetch(consumer):
            """Fills, as one warp, a consumer's ring."""
            walk = walk_of(consumer)

            def fetch_run(index, before):
                cols, _, first, tiles = walk.run(index)

                def fetch_tile(tile, _):
                    slot, at_k = slot_of(consumer, before + tile), walk.rows(first + tile)
                    at_scale = lax.div(first + tile, scale_tiles) if of_tiles else 0
                    plgpu.barrier_wait(free.at[slot])
                    for gmem, name in (
                        (q_gmem.at[at_k, cols], "q_smem"),
                        (x_gmem.at[:, at_k], "x_smem"),
                        *((one.at[at_scale, cols], "scales_smem") for one in scales_gmem),
                    ):
                        plgpu.copy_gmem_to_smem(gmem, buffers[name].at[slot], ready.at[slot])

                lax.fori_loop(0, tiles, fetch_tile, None)
                return before + tiles

            lax.fori_loop(0, walk.runs, fetch_run, jnp.int32(0))
            # Every slot was handed back once more than it was filled.
            for slot in range(c.slots):
                plgpu.barrier_wait(free.at[consumer * c.slots + slot])

        @pl.when(warpgroup == c.consumers)
        def _fetch_all():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _warp(warp):
                @pl.when(warp == 0)
                def _fetch_table():
                    plgpu.copy_gmem_to_smem(table_gmem, buffers["table_smem"], table_ready)

                @pl.when(warp < c.consumers)
                def _fetch():
                    fetch(warp)

        @pl.when(warpgroup < c.consumers)
        def _consume():
            plgpu.set_max_registers(consume_registers(c.consumers), action="increase")
            walk, sums_smem = walk_of(warpgroup), buffers["sums_smem"].at[warpgroup]
            for slot in range(c.slots):
                plgpu.barrier_arrive(free.at[slot_of(warpgroup, slot)])
            zero = plgpu.layout_cast(jnp.zeros((held, c.tile_cols), jnp.float32), layout)
            plgpu.barrier_wait(table_ready)

            def consume_run(index, before):
                cols, split, _, tiles = walk.run(index)

                def add(tile, total):
                    slot = slot_of(warpgroup, before + tile)
                    operands = (
                        buffers["x_smem"].at[slot],
                        buffers["q_smem"].at[slot],
                        buffers["table_smem"],
                    )
                    plgpu.barrier_wait(ready.at[slot])
                    if of_tiles:
                        sums = quantised_tile.multiplied(zero, *operands)
                        scale = plgpu.load(
                            buffers["scales_smem"].at[slot],
                            layout=layout.reduce(0),
                            optimized=False,
                        ).astype(jnp.float32)
                        total = total + sums * lax.broadcast_in_dim(scale, total.shape, (1,))
                    else:
                        total = quantised_tile.multiplied(total, *operands)
                    # Without it the copy engine overtakes what the lanes read.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(free.at[slot])
                    return total

                total = lax.fori_loop(0, tiles, add, zero)
                quantised_tile.store(total, sums_smem, qvalue.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(sums_smem.at[pl.ds(0, rows)], out_gmem.at[split, :, cols])
                # The next run writes there.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                return before + tiles

            lax.fori_loop(0, walk.runs, consume_run, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    of_x = quantised_tile.swizzled if copied == held else plgpu.SMEM
    sums = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tiling.splits, rows, tiling.out), jnp.float32),
        grid=(pl.cdiv(tiling.blocks, c.consumers),),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        scratch_types={
            "buffers": {
                "x_smem": of_x((ring, copied, TILE_ROWS), dtype),
                "q_smem": quantised_tile.swizzled((ring, TILE_ROWS, c.tile_cols), qvalue.dtype),
                "table_smem": plgpu.SMEM(table.shape, table.dtype),
                "scales_smem": plgpu.SMEM((ring, c.tile_cols), scale_dtype),
                "sums_smem": plgpu.SMEM((c.consumers, held, c.tile_cols), jnp.float32),
            },
            "ready": plgpu.Barrier(num_arrivals=2 + len(of_tiles), num_barriers=ring),
            "free": plgpu.Barrier(num_barriers=ring),
            "table_ready": plgpu.Barrier(),
        },
        kernel_name="dora_quantised_rows",
    )(x, qvalue, table, *of_tiles)
    return jnp.sum(sums, axis=0)
