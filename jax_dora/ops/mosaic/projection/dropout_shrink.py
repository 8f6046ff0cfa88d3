"""A product with a dropped operand. The mask is computed after x has been copied to shared memory.

    drop(x) right     x [rows, k]   right [k, cols]      forward: z = drop(x) A
    drop(x)ᵀ right    x [k, rows]   right [k, cols]      backward: dA = drop(x)ᵀ dz

drop(x) is x where `jax_dora.ops.dropout.keep_mask` is True and 0 elsewhere; the caller multiplies
the result by 1 / kept_share(rate). x and right are both bf16 or both fp16; the result is fp32.

Each consumer warpgroup overwrites its part of a slice of x with drop(x), while the tensor cores
multiply its previous slice. Neither the mask nor drop(x) is ever in device memory. If the result
has too few tiles to occupy the device, the contracted axis is split into parts; XLA adds the parts'
results in a fixed order.

FLOPs: 2 · rows · k · cols.
Bytes: x and right once, and the fp32 results of the parts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.dropout import pair_bits, row_hash, threshold
from jax_dora.ops.mosaic.hopper import limits, ring
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import FETCH_REGISTERS, TILE_K, consume_registers

CONSUMERS = 2
# Each consumer issues one m64 wgmma per slice.
TILE_ROWS = 64 * CONSUMERS
MAX_TILE_COLS = 256
# Swizzled rows of 128 bytes: 64 16-bit numbers of the operands, 32 fp32 numbers of the result.
CHUNK, STORED_COLS = 64, 32
CHUNK_BUFFERS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning parameters.

    Attributes:
      stages: the number of pipeline stages, one slice of both operands each.
      parts: the number of parts of the contracted axis; None balances them over the
        multiprocessors.
    """

    stages: int = 4
    parts: int | None = None


def refuses(rows: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why x [rows, in] and an adapter of that rank are not supported, or None."""
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
    """Returns the config for a supported call."""
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
    """Returns f32[rows, cols]: drop(x) right, or drop(x)ᵀ right if `transposed`.

    Args:
      x: [rows, k], or [k, rows] if transposed.
      right: [k, cols].
      seed: uint32[2], see `jax_dora.ops.Dropout`.
      start: uint32[2], the global row and column of x's first element if x is a shard. The column
        is a multiple of 64.
      rate: see `jax_dora.ops.Dropout`.
      transposed: whether x is transposed.
      config, sm_count: see `choose.Choice`.
    """
    c, dtype = config, x.dtype
    start = jnp.zeros(2, jnp.uint32) if start is None else start
    k, rows = x.shape if transposed else x.shape[::-1]
    cols = right.shape[1]
    tile_cols = _tile_cols(cols)
    col_tiles = pl.cdiv(cols, tile_cols)
    row_tiles, steps = pl.cdiv(rows, TILE_ROWS), pl.cdiv(k, TILE_K)
    tiles = row_tiles * col_tiles
    part = pl.cdiv(steps, c.parts or ring.parts(steps, tiles, sm_count))
    parts = pl.cdiv(steps, part)
    x_tile = (TILE_K, TILE_ROWS) if transposed else (TILE_ROWS, TILE_K)
    # TMA requires rows of a multiple of 16 bytes, and the tensor cores blocks of 8 rows.
    x = limits.pad(x, pl.cdiv(x.shape[0], limits.ROW_ALIGNMENT) * limits.ROW_ALIGNMENT, x.shape[1])
    right = limits.pad(right, x.shape[0] if transposed else k, limits.padded_rank(cols))
    padded_rows, padded_cols = row_tiles * TILE_ROWS, col_tiles * tile_cols

    # seed_gmem: uint32[4], the seed and the start; out_gmem: [parts · padded_rows, padded_cols].
    def body(x_gmem, right_gmem, seed_gmem, out_gmem, *, x_smem, right_smem, out_smem, **barriers):
        x_ready, right_ready, free = (barriers[n] for n in ("x_ready", "right_ready", "free"))
        unit, warpgroup = lax.axis_index("unit"), lax.axis_index("warpgroup")
        my_part, tile = lax.rem(unit, parts), lax.div(unit, parts)
        row = lax.div(tile, col_tiles) * TILE_ROWS
        col = lax.rem(tile, col_tiles) * tile_cols
        first = my_part * part
        my_steps = jnp.minimum(part, steps - first)

        @pl.when(warpgroup == CONSUMERS)
        def _fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def copies(i, stage):
                at_k, at_rows = pl.ds((first + i) * TILE_K, TILE_K), pl.ds(row, TILE_ROWS)
                x_tile_gmem = x_gmem.at[(at_k, at_rows) if transposed else (at_rows, at_k)]
                right_tile_gmem = right_gmem.at[at_k, pl.ds(col, tile_cols)]
                return (
                    (x_tile_gmem, x_smem.at[stage], x_ready.at[stage]),
                    (right_tile_gmem, right_smem.at[stage], right_ready.at[stage]),
                )

            ring.fetch(my_steps, copies, free)

        @pl.when(warpgroup < CONSUMERS)
        def _consume():
            plgpu.set_max_registers(consume_registers(CONSUMERS), action="increase")
            ring.release(free)
            my_rows = pl.ds(warpgroup * CHUNK, CHUNK)
            seeds = seed_gmem[0], seed_gmem[1]
            origin = seed_gmem[2], seed_gmem[3]

            def multiply(acc_ref, stage, i):
                my_x_smem = x_smem.at[
                    (stage, slice(None), my_rows) if transposed else (stage, my_rows)
                ]
                at_row, at_k = row + warpgroup * CHUNK, (first + i) * TILE_K
                corner = (at_k, at_row) if transposed else (at_row, at_k)
                plgpu.barrier_wait(x_ready.at[stage])
                my_x_smem[...] = _drop(my_x_smem[...], corner, origin, seeds, rate)
                plgpu.commit_smem()
                plgpu.barrier_wait(right_ready.at[stage])
                left = my_x_smem.transpose((1, 0)) if transposed else my_x_smem
                plgpu.wgmma(acc_ref, left, right_smem.at[stage])

            acc = ring.accumulate(my_steps, multiply, (CHUNK, tile_cols), free)
            plgpu.barrier_arrive(free.at[lax.rem(my_steps - 1, c.stages)])
            at_rows = pl.ds(my_part * padded_rows + row + warpgroup * CHUNK, CHUNK)
            for i, start in enumerate(range(0, tile_cols, STORED_COLS)):
                buffer_smem = out_smem.at[warpgroup * CHUNK_BUFFERS + i % CHUNK_BUFFERS]
                plgpu.wait_smem_to_gmem(CHUNK_BUFFERS - 1, wait_read_only=True)
                buffer_smem[...] = acc[:, start : start + STORED_COLS]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    buffer_smem, out_gmem.at[at_rows, pl.ds(col + start, STORED_COLS)]
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
            "x_smem": limits.tiled((c.stages, *x_tile), dtype),
            "right_smem": limits.tiled((c.stages, TILE_K, tile_cols), dtype),
            "out_smem": limits.tiled((CONSUMERS * CHUNK_BUFFERS, CHUNK, STORED_COLS), jnp.float32),
            "x_ready": barriers(),
            "right_ready": barriers(),
            "free": barriers(CONSUMERS),
        },
        kernel_name="dora_dropout_shrink_back" if transposed else "dora_dropout_shrink",
    )(x, right, jnp.concatenate([seed, start]))
    return result.reshape(parts, padded_rows, padded_cols)[:, :rows, :cols].sum(0)


def _drop(
    tile: jax.Array,
    corner: tuple[Any, Any],
    start: tuple[Any, Any],
    seeds: tuple[Any, Any],
    rate: float,
) -> jax.Array:
    """Returns a tile [64, 64] of x with zeros where x is dropped.

    Args:
      tile: the tile, in the register layout of wgmma.
      corner: the row and column of the tile's first element in x.
      start: the global row and column of x's first element.
      seeds: the two numbers of the seed.
      rate: the dropout rate.
    """
    half = (CHUNK, CHUNK // 2)
    first_row, first_col = (
        lax.convert_element_type(index, jnp.uint32) + offset
        for index, offset in zip(corner, start, strict=True)
    )

    def iota(axis):
        return plgpu.broadcasted_iota(jnp.uint32, half, axis, layout=plgpu.Layout.WGMMA)

    rows = row_hash(*seeds, first_row + iota(0))
    bits = pair_bits(rows, (first_col >> 1) + iota(1))
    zero = jnp.zeros(half, tile.dtype)
    left = jnp.where((bits & 0xFFFF) >= threshold(rate), tile[:, : CHUNK // 2], zero)
    right = jnp.where((bits >> 16) >= threshold(rate), tile[:, CHUNK // 2 :], zero)
    return jnp.concatenate([left, right], axis=1)


def _tile_cols(cols: int) -> int:
    """Returns the width of a tile: the smallest that covers `cols` with the fewest tiles."""
    return pl.cdiv(pl.cdiv(cols, pl.cdiv(cols, MAX_TILE_COLS)), CHUNK) * CHUNK
