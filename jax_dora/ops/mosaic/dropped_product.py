"""A product with a dropped operand, whose mask is drawn in shared memory on the way to it.

    drop(x) right     x [rows, k]   right [k, cols]      forward: z = drop(x) A
    drop(x)ᵀ right    x [k, rows]   right [k, cols]      backward: dA = drop(x)ᵀ dz

drop(x) is x where `jax_dora.ops.dropout.keep_mask` says so and 0 elsewhere; the factor
1 / kept_share(rate) is left to whoever scales the result. All of bf16 or all of fp16; the result is
fp32, unrounded.

Each consumer owns the part of a slice of x that it multiplies: it overwrites that in place, while
the tensor cores are at its slice before. Neither the mask nor the dropped x is ever in device
memory. Where the result has too few tiles to occupy the device, the contracted axis is split; XLA
adds the parts up, in a fixed order.

FLOPs: 2 · rows · k · cols; bytes: x and right once, and the result's parts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.dropout import pair_bits, row_hash, threshold
from jax_dora.ops.mosaic import hopper
from jax_dora.ops.mosaic.hopper import FETCH_REGISTERS, TILE_K, consume_registers
from jax_dora.ops.mosaic.launch import launcher

CONSUMERS = 2
# One m64 instruction for each consumer.
TILE_ROWS = 64 * CONSUMERS
MAX_TILE_COLS = 256
# A swizzled row of 16-bit numbers, and of the result's.
CHUNK, STORED_COLS = 64, 32
CHUNK_SLOTS = 2
# What a part of the contracted axis costs beside its own steps: filling the pipeline, storing.
PART_STEPS = 6
MOST_PARTS = 16


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch knobs.

    Attributes:
      stages: slices of the operands in flight.
      parts: into which the contracted axis is split; None balances them over the multiprocessors.
    """

    stages: int = 4
    parts: int | None = None


def refuses(rows: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why x [rows, in] and an adapter of that rank are not taken, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if 0 in (rows, rank):
        return f"there are no {'rows' if rank else 'ranks'}"
    if in_features == 0 or in_features % CHUNK:
        return f"in = {in_features} is not a multiple of {CHUNK}"
    return None


def wins(rows: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was no slower than XLA (H200, 1713ac4, `benchmarks ops`)."""
    return rows >= 1024 and in_features >= 4096 and rank <= 543


def config(rows: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the launch knobs for a call that is not refused."""
    return Config()


@launcher("rate", "transposed")
def launch(
    x: jax.Array,
    right: jax.Array,
    seed: jax.Array,
    start: jax.Array | None = None,
    *,
    rate: float,
    transposed: bool,
    config: Config,
    sm_count: int,
) -> jax.Array:
    """Returns f32[rows, cols]: drop(x) right, or drop(x)ᵀ right, of x with two axes; rate and seed
    are those of `jax_dora.ops.Dropout`, and start uint32[2] is the row and the column at which x
    starts in what is dropped, the latter a multiple of 64."""
    c, dtype = config, x.dtype
    start = jnp.zeros(2, jnp.uint32) if start is None else start
    k, rows = x.shape if transposed else x.shape[::-1]
    cols = right.shape[1]
    tile_cols = _tile_cols(cols)
    col_tiles = pl.cdiv(cols, tile_cols)
    row_tiles, steps = pl.cdiv(rows, TILE_ROWS), pl.cdiv(k, TILE_K)
    tiles = row_tiles * col_tiles
    part = pl.cdiv(
        steps,
        c.parts or hopper.balanced(steps, tiles, sm_count, overhead=PART_STEPS, most=MOST_PARTS),
    )
    parts = pl.cdiv(steps, part)
    x_tile = (TILE_K, TILE_ROWS) if transposed else (TILE_ROWS, TILE_K)
    # The copy engine can address rows of 16 bytes, and the tensor cores blocks of 8 rows.
    x = hopper.pad(x, pl.cdiv(x.shape[0], hopper.ROW_ALIGNMENT) * hopper.ROW_ALIGNMENT, x.shape[1])
    right = hopper.pad(right, x.shape[0] if transposed else k, hopper.padded_rank(cols))
    padded_rows, padded_cols = row_tiles * TILE_ROWS, col_tiles * tile_cols

    def body(x_gmem, right_gmem, seed_gmem, out_gmem, **buffers):
        x_smem, right_smem, out_smem = (buffers[n] for n in ("x_smem", "right_smem", "out_smem"))
        unit, warpgroup = lax.axis_index("unit"), lax.axis_index("warpgroup")
        my_part, tile = lax.rem(unit, parts), lax.div(unit, parts)
        row = lax.div(tile, col_tiles) * TILE_ROWS
        col = lax.rem(tile, col_tiles) * tile_cols
        first = my_part * part
        my_steps = jnp.minimum(part, steps - first)

        @pl.when(warpgroup == CONSUMERS)
        def _fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def fetch_slice(i, _):
                slot = lax.rem(i, c.stages)
                at_k, at_rows = pl.ds((first + i) * TILE_K, TILE_K), pl.ds(row, TILE_ROWS)
                plgpu.barrier_wait(buffers["free"].at[slot])
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[(at_k, at_rows) if transposed else (at_rows, at_k)],
                    x_smem.at[slot],
                    buffers["x_ready"].at[slot],
                )
                plgpu.copy_gmem_to_smem(
                    right_gmem.at[at_k, pl.ds(col, tile_cols)],
                    right_smem.at[slot],
                    buffers["right_ready"].at[slot],
                )

            lax.fori_loop(0, my_steps, fetch_slice, None)
            # Every buffer was handed back once more than it was filled.
            for slot in range(c.stages):
                plgpu.barrier_wait(buffers["free"].at[slot])

        @pl.when(warpgroup < CONSUMERS)
        def _consume():
            plgpu.set_max_registers(consume_registers(CONSUMERS), action="increase")
            for slot in range(c.stages):
                plgpu.barrier_arrive(buffers["free"].at[slot])
            my_rows = pl.ds(warpgroup * CHUNK, CHUNK)
            seeds = seed_gmem[0], seed_gmem[1]
            origin = seed_gmem[2], seed_gmem[3]

            def multiply(acc_ref):
                def step(i, acc_ref):
                    slot = lax.rem(i, c.stages)
                    mine = x_smem.at[
                        (slot, slice(None), my_rows) if transposed else (slot, my_rows)
                    ]
                    at_row, at_k = row + warpgroup * CHUNK, (first + i) * TILE_K
                    corner = (at_k, at_row) if transposed else (at_row, at_k)
                    plgpu.barrier_wait(buffers["x_ready"].at[slot])
                    mine[...] = _drop(mine[...], corner, origin, seeds, rate)
                    plgpu.commit_smem()
                    plgpu.barrier_wait(buffers["right_ready"].at[slot])
                    left = mine.transpose((1, 0)) if transposed else mine
                    plgpu.wgmma(acc_ref, left, right_smem.at[slot])
                    return acc_ref

                def step_and_free(i, acc_ref):
                    step(i, acc_ref)
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(buffers["free"].at[lax.rem(i - 1, c.stages)])
                    return acc_ref

                step(0, acc_ref)
                lax.fori_loop(1, my_steps, step_and_free, acc_ref)
                return acc_ref[...]

            acc = pl.run_scoped(
                multiply, plgpu.WGMMAAccumulatorRef((CHUNK, tile_cols), jnp.float32)
            )
            plgpu.barrier_arrive(buffers["free"].at[lax.rem(my_steps - 1, c.stages)])
            at_rows = pl.ds(my_part * padded_rows + row + warpgroup * CHUNK, CHUNK)
            for i, start in enumerate(range(0, tile_cols, STORED_COLS)):
                place = out_smem.at[warpgroup * CHUNK_SLOTS + i % CHUNK_SLOTS]
                plgpu.wait_smem_to_gmem(CHUNK_SLOTS - 1, wait_read_only=True)
                place[...] = acc[:, start : start + STORED_COLS]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    place, out_gmem.at[at_rows, pl.ds(col + start, STORED_COLS)]
                )
            plgpu.wait_smem_to_gmem(0)

    def barriers(num_arrivals=1):
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=c.stages)

    result = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts * padded_rows, padded_cols), jnp.float32),
        grid=(tiles * parts,),
        grid_names=("unit",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "x_smem": hopper.tiled((c.stages, *x_tile), dtype),
            "right_smem": hopper.tiled((c.stages, TILE_K, tile_cols), dtype),
            "out_smem": hopper.tiled((CONSUMERS * CHUNK_SLOTS, CHUNK, STORED_COLS), jnp.float32),
            "x_ready": barriers(),
            "right_ready": barriers(),
            "free": barriers(CONSUMERS),
        },
        kernel_name="dora_dropped_product_back" if transposed else "dora_dropped_product",
    )(x, right, jnp.concatenate([seed, start]))
    return result.reshape(parts, padded_rows, padded_cols)[:, :rows, :cols].sum(0)


def _drop(
    tile: jax.Array,
    corner: tuple[Any, Any],
    start: tuple[Any, Any],
    seeds: tuple[Any, Any],
    rate: float,
) -> jax.Array:
    """Returns `tile` [64, 64] of x, as the tensor cores hold it, with zeros where x is dropped.

    `corner` says where the tile lies in x, and `start` where x lies in what is dropped.
    """
    half = (CHUNK, CHUNK // 2)
    first_row, first_col = (
        lax.convert_element_type(at, jnp.uint32) + before
        for at, before in zip(corner, start, strict=True)
    )

    def index(axis):
        return plgpu.broadcasted_iota(jnp.uint32, half, axis, layout=plgpu.Layout.WGMMA)

    rows = row_hash(*seeds, first_row + index(0))
    bits = pair_bits(rows, (first_col >> 1) + index(1))
    zero = jnp.zeros(half, tile.dtype)
    left = jnp.where((bits & 0xFFFF) >= threshold(rate), tile[:, : CHUNK // 2], zero)
    right = jnp.where((bits >> 16) >= threshold(rate), tile[:, CHUNK // 2 :], zero)
    return jnp.concatenate([left, right], axis=1)


def _tile_cols(cols: int) -> int:
    """Returns the width of a tile: the narrowest of which the fewest tiles cover `cols`."""
    return pl.cdiv(pl.cdiv(cols, pl.cdiv(cols, MAX_TILE_COLS)), CHUNK) * CHUNK
