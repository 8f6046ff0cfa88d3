"""The product of few rows with a quantised kernel: y = x (σ∘v(q)).

    x  [rows, in]  bf16 or fp16, 1 to 64 rows     σ  f32[in / t, out], t = in or a multiple of 64
    q  [in, out]  int8, float8_e4m3fn, or uint8 [in, out / 2] of two 4-bit numbers each
    y  [rows, out]  x's dtype

A tile of q becomes x's dtype in registers and goes to shared memory, where the tensor cores take
it beside 64 rows of x, however few there are. Scales of whole columns are applied to the sum, in
fp32; others to the tile, in fp32 or in x's dtype where they are stored so. Consumers, a warpgroup
each, take turns at the tiles of a run, so that one converts while another multiplies; at the end of
a run they add their sums up. Runs of a strip are added by XLA, in a fixed order.

Bytes: q and σ once, which set the floor; x and the sums are in the level-2 cache. Packed numbers
are ordered as in `quantised_norm`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import hopper
from jax_dora.ops.mosaic.hopper import FETCH_REGISTERS, TILE_K, consume_registers, tiled
from jax_dora.ops.mosaic.launch import launcher
from jax_dora.ops.mosaic.low_rank_kernel import Walk
from jax_dora.ops.mosaic.low_rank_tiling import TILE_ROWS, Config, Tiling
from jax_dora.ops.mosaic.quantised_matrix import Packing, numbers
from jax_dora.ops.quantised import Format

# Rows of one instruction.
MOST_ROWS = 64


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
    # The copy engine reads rows of 16 bytes.
    alignment = 16 * form.packed
    if out == 0 or out % alignment:
        return f"out = {out} is not a multiple of {alignment}"
    return None


def wins(rows: int, in_features: int, out: int, form: Format, dtype: Any) -> bool:
    """Returns whether the kernel is taken to be no slower than XLA, which copies the kernel in
    x's dtype before it multiplies."""
    return in_features >= 1024 and out >= 1024


def config(rows: int, in_features: int, out: int, form: Format, dtype: Any) -> Config:
    """Returns the launch knobs for a call that is not refused."""
    return Config(tile_cols=128, slots=3, consumers=2)


def slot_of(tile: Any, config: Config) -> Any:
    """Returns the slot of a block's tile, of which consumer tile % consumers has every one."""
    turn = lax.div(tile, config.consumers)
    return lax.rem(tile, config.consumers) * config.slots + lax.rem(turn, config.slots)


def fetch(
    walk: Walk, config: Config, free: Any, of_run: Callable[..., Callable[..., None]]
) -> None:
    """Has every tile of a block's runs copied into its slot, once that is free: the whole work of
    the warpgroup that fetches.

    Args:
      of_run: `(index, cols, first) -> (slot, at_k, tile) -> None`; the latter starts the copies of
        tile `first + tile`, whose rows are at_k, in run `index`.
    """
    plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

    def fetch_run(index, before):
        cols, _, first, tiles = walk.run(index)
        copy = of_run(index, cols, first)

        def fetch_tile(tile, _):
            slot = slot_of(before + tile, config)
            at_k = walk.rows(first + tile)
            plgpu.barrier_wait(free.at[slot])
            copy(slot, at_k, tile)

        lax.fori_loop(0, tiles, fetch_tile, None)
        return before + tiles

    lax.fori_loop(0, walk.runs, fetch_run, jnp.int32(0))
    # Every slot was handed back once more than it was filled.
    for slot in range(config.consumers * config.slots):
        plgpu.barrier_wait(free.at[slot])


@launcher()
def launch(
    x: jax.Array, qvalue: jax.Array, scales: jax.Array, *, config: Config, sm_count: int
) -> jax.Array:
    """Returns [..., out] for x [..., in], qvalue [in, out] and scales [in / t, out / u]."""
    shape, dtype, c = x.shape, x.dtype, config
    in_features, out = qvalue.shape
    x = x.reshape(-1, in_features)
    rows = x.shape[0]
    held_rows = pl.cdiv(rows, hopper.ROW_ALIGNMENT) * hopper.ROW_ALIGNMENT
    x = hopper.pad(x, held_rows, in_features)
    tiling = Tiling(in_features, out, c, sm_count)
    packing = Packing(qvalue.dtype, tiling)
    # What a tile is scaled in: two numbers of 16 bits take the time of one of 32.
    is_whole = scales.shape[0] == 1
    working = dtype if is_whole or scales.dtype == dtype else jnp.float32
    elements, scales = packing.elements(qvalue), packing.scales(scales)
    of_tiles = [] if is_whole else [scales.astype(working)]
    scale_tiles = tiling.row_tiles // scales.shape[0]
    width = c.tile_cols // packing.packed
    chunk = min(TILE_K, width)
    chunks = [pl.ds(start, chunk) for start in range(0, c.tile_cols, chunk)]
    ring = c.consumers * c.slots

    def kernel(x_gmem, q_gmem, *rest, x_smem, q_smem, w_smem, sums_smem, scales_smem, barriers):
        *scales_gmem, out_gmem = rest
        ready, free, turn_of = barriers["ready"], barriers["free"], barriers["turn"]
        walk = Walk(tiling, lax.axis_index("block"))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == c.consumers)
        def _fetch():
            def of_run(index, cols, first):
                at = pl.ds(lax.div(cols.start, c.tile_cols) * width, width)

                def copy(slot, at_k, tile):
                    plgpu.copy_gmem_to_smem(q_gmem.at[at_k, at], q_smem.at[slot], ready.at[slot])
                    plgpu.copy_gmem_to_smem(
                        # All rows that a tile has: past the last the copy engine reads zeros.
                        x_gmem.at[pl.ds(index * 0, MOST_ROWS), at_k],
                        x_smem.at[slot],
                        ready.at[slot],
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

            def convert(slot, w_tile):
                """Puts a tile's numbers where the tensor cores read."""
                values = numbers(packing, q_smem.at[slot], chunks, working)
                for at, value in zip(chunks, values, strict=True):
                    if of_tiles:
                        scale = scales_smem[slot, at]
                        value = value * lax.broadcast_in_dim(scale, value.shape, (1,))
                    w_tile[:, at] = value.astype(dtype)
                plgpu.commit_smem()

            def consume_run(index, before):
                cols, split, _, tiles = walk.run(index)
                skipped, turns = walk.turns(warpgroup, before, tiles, c.consumers)

                def tile_of(i):
                    return slot_of(before + skipped + i * c.consumers, c)

                def multiply(acc_ref):
                    def step(i, acc_ref):
                        slot, w_tile = tile_of(i), w_smem.at[warpgroup * 2 + lax.rem(i, 2)]
                        plgpu.barrier_wait(ready.at[slot])
                        convert(slot, w_tile)
                        plgpu.wgmma(acc_ref, x_smem.at[slot], w_tile)
                        return acc_ref

                    def step_and_free(i, acc_ref):
                        step(i, acc_ref)
                        # All but this tile's product are done.
                        plgpu.wgmma_wait(1)
                        plgpu.barrier_arrive(free.at[tile_of(i - 1)])
                        return acc_ref

                    @pl.when(turns > 0)
                    def _first():
                        step(0, acc_ref)

                    lax.fori_loop(1, turns, step_and_free, acc_ref)
                    return acc_ref[...]

                acc = pl.run_scoped(
                    multiply, plgpu.WGMMAAccumulatorRef((MOST_ROWS, c.tile_cols), jnp.float32)
                )

                @pl.when(turns > 0)
                def _free_last():
                    plgpu.barrier_arrive(free.at[tile_of(turns - 1)])

                plgpu.barrier_wait(turn_of.at[warpgroup])

                @pl.when(warpgroup == 0)
                def _begin_sum():
                    sums_smem[...] = acc

                @pl.when(warpgroup > 0)
                def _add_to_sum():
                    sums_smem[...] = sums_smem[...] + acc

                @pl.when(warpgroup == c.consumers - 1)
                def _store():
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        sums_smem.at[pl.ds(0, held_rows)], out_gmem.at[split, :, cols]
                    )
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                plgpu.barrier_arrive(turn_of.at[lax.rem(warpgroup + 1, c.consumers)])
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
        out_type=jax.ShapeDtypeStruct((tiling.splits, held_rows, tiling.padded_out), jnp.float32),
        grid=(tiling.blocks,),
        grid_names=("block",),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        scratch_types={
            "x_smem": tiled((ring, MOST_ROWS, TILE_K), dtype),
            "q_smem": tiled((ring, TILE_ROWS, width), elements.dtype, elements.shape[1]),
            "w_smem": tiled((2 * c.consumers, TILE_ROWS, c.tile_cols), dtype),
            "sums_smem": tiled((MOST_ROWS, c.tile_cols), jnp.float32),
            "scales_smem": plgpu.SMEM((ring, c.tile_cols), working),
            "barriers": {
                "ready": plgpu.Barrier(num_arrivals=2 + len(of_tiles), num_barriers=ring),
                "free": plgpu.Barrier(num_barriers=ring),
                "turn": plgpu.Barrier(num_barriers=c.consumers),
            },
        },
        kernel_name="dora_quantised_product",
    )(x, elements, *of_tiles)
    y = jnp.sum(sums, axis=0)
    y = packing.in_order(y if of_tiles else y * scales)
    return y[:rows, :out].astype(dtype).reshape(*shape[:-1], out)
