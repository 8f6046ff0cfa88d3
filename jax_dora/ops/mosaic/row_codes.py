"""Rows rounded to FP8, each by a scale of its own, in one pass.

    x  [rows, in]  bf16 or fp16      s = max |x| / 448, of a row, f32[rows]
    x̂  = round(x / s)  [rows, in]  float8_e4m3fn

A row stays in shared memory between the search for its largest number and its rounding, so that it
is fetched once. A row of zeros has the least scale, and stays zeros; NaN and infinity make their
row NaN.

Bytes: 2 · rows · in read, 1 · rows · in written; memory is the floor: bytes / copy rate.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.launch import launcher
from jax_dora.ops.rounding import bound

QTYPE = "float8_e4m3fn"
THREADS = 128
# A thread holds up to 8 neighbouring numbers of a chunk, 16 bytes.
MAX_CHUNK = 8 * THREADS
# The copy engine takes no box with a side over this.
MAX_SIDE = 256
MAX_FEATURES = 16_384
# The scale of a row of zeros.
LEAST = float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch knobs.

    Attributes:
      tile_bytes: of x that are fetched at a time, one row at least.
      stages: tiles being fetched while one is worked on.
      blocks_per_sm: resident thread blocks, to overlap one's search with another's waiting.
    """

    tile_bytes: int = 16_384
    stages: int = 2
    blocks_per_sm: int = 4


def refuses(rows: int, in_features: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why x [rows, in] of `dtype` is not taken, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if 0 in (rows, in_features):
        return f"one of rows = {rows}, in = {in_features} is 0"
    if in_features % THREADS:
        return f"in = {in_features} is not a multiple of {THREADS}"
    if in_features > MAX_FEATURES:
        return f"in = {in_features} is more than {MAX_FEATURES}: too long a row"
    return None


def wins(rows: int, in_features: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel is taken for its one pass, where XLA makes two (H200, 4096 × 8192:
    24.1 µs, at the copy rate)."""
    return rows >= 1024 and in_features >= 1024 and rows * in_features >= 2**22


def config(rows: int, in_features: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the launch knobs for [rows, in] of `dtype`."""
    return Config()


@launcher()
def launch(x: jax.Array, *, config: Config, sm_count: int) -> tuple[jax.Array, jax.Array]:
    """Returns (codes [..., in], scales f32[...]) of x [..., in]."""
    *lead, in_features = x.shape
    rows, lane = x.size // in_features, math.gcd(in_features, MAX_SIDE)
    width = in_features // lane
    tile_rows = max(1, config.tile_bytes // (in_features * x.dtype.itemsize))
    row_tiles = pl.cdiv(rows, tile_rows)
    blocks = min(row_tiles, sm_count * config.blocks_per_sm)
    steps = pl.cdiv(row_tiles, blocks)
    view = (rows, width, lane)
    chunk_width = math.gcd(in_features, MAX_CHUNK) // lane
    chunks = [pl.ds(start, chunk_width) for start in range(0, width, chunk_width)]
    share = 1 / bound(QTYPE)  # What XLA, too, multiplies with.

    def kernel(x_gmem, codes_gmem, scales_gmem, codes_smem):
        block = lax.axis_index("block")

        def step(indices, x_smem):  # [tile_rows, width, lane]
            (index,) = indices
            slot = lax.rem(index, 2)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            first = (block + index * blocks) * tile_rows
            for row in range(tile_rows):
                largest = jnp.zeros((chunk_width, lane), jnp.float32)
                for chunk in chunks:
                    largest = jnp.maximum(largest, jnp.abs(x_smem[row, chunk].astype(jnp.float32)))
                scale = jnp.maximum(jnp.max(largest) * share, LEAST)
                for chunk in chunks:
                    codes = x_smem[row, chunk].astype(jnp.float32) / scale
                    codes_smem[slot, row, chunk] = codes.astype(QTYPE)
                scales_gmem[first + row] = scale
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(codes_smem.at[slot], codes_gmem.at[pl.ds(first, tile_rows)])

        plgpu.emit_pipeline(
            step,
            grid=(steps,),
            in_specs=[
                plgpu.BlockSpec(
                    (tile_rows, width, lane), lambda index: (block + index * blocks, 0, 0)
                )
            ],
            max_concurrent_steps=config.stages,
        )(x_gmem)
        plgpu.wait_smem_to_gmem(0)

    codes, scales = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(view, QTYPE),
            jax.ShapeDtypeStruct((steps * blocks * tile_rows,), jnp.float32),
        ],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((2, tile_rows, width, lane), QTYPE)],
        kernel_name="dora_row_codes",
    )(x.reshape(view))
    return codes.reshape(x.shape), scales[:rows].reshape(lead)
