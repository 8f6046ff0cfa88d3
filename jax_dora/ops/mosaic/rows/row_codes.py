"""Quantises rows to FP8 with one scale per row, in one pass.

    x  [rows, in]  bf16 or fp16      s = max |x| / bound per row, f32[rows]
    x̂  = round(x / s)  [rows, in]  float8_e4m3fn (bound 448) or float8_e5m2 (57344)

With columns [in], f32 or bf16, x∘columns replaces x above: for a product that sums over the
features that a kernel's scales belong to.

A row is copied to shared memory once, where its maximum is computed and its elements are rounded. A
row of zeros has the scale `LEAST` and stays zero. A row with NaN or infinity becomes NaN.

Bytes: 2 · rows · in read, rows · in written; the floor is bytes / copy rate. A thread keeps its
columns in registers, if they fit there. Otherwise they are read twice for each row, from the L1 or
L2 cache.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import RESERVED, SHARED_MEMORY
from jax_dora.ops.rounding import bound

QTYPE = "float8_e4m3fn"
THREADS = 128
# A thread holds up to 8 adjacent numbers of a chunk, 16 bytes.
MAX_CHUNK = 8 * THREADS
# The maximum size of a TMA box along an axis.
MAX_SIDE = 256
# The longest rows that were measured.
MAX_FEATURES = 28_672
# The registers of a thread for columns: all of the longest rows in 16 bits.
COLUMN_REGISTERS = MAX_FEATURES // THREADS // 2
# The scale of a row of zeros.
LEAST = float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning parameters.

    Attributes:
      tile_bytes: the bytes of a tile of x, which has at least one row.
      stages: the number of pipeline stages.
      blocks_per_sm: the number of thread blocks per multiprocessor: one computes while another
        waits for memory.
    """

    tile_bytes: int = 16_384
    stages: int = 2
    blocks_per_sm: int = 4


def refuses(rows: int, in_features: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why the kernel does not support x [rows, in] of `dtype`, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if 0 in (rows, in_features):
        return f"one of rows = {rows}, in = {in_features} is 0"
    if in_features % THREADS:
        return f"in = {in_features} is not a multiple of {THREADS}"
    if in_features > MAX_FEATURES:
        return f"in = {in_features} is too long; a row has at most {MAX_FEATURES} features"
    return None


def wins(rows: int, in_features: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel is expected to be faster than XLA, which takes two passes instead
    of one (H200, 4096 × 8192: 24.1 µs, at the copy rate)."""
    return rows >= 1024 and in_features >= 1024 and rows * in_features >= 2**22


def config(rows: int, in_features: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the config for [rows, in] of `dtype`: up to 4 blocks, as many as shared memory has
    room for, but at least 2, which then do not copy ahead."""
    default = Config()
    tile = max(default.tile_bytes, in_features * jnp.dtype(dtype).itemsize)
    block = RESERVED + (default.stages + 1) * tile  # Codes for two tiles are as large as one.
    if SHARED_MEMORY < 2 * block:
        return dataclasses.replace(default, stages=1, blocks_per_sm=2)
    return dataclasses.replace(default, blocks_per_sm=min(4, SHARED_MEMORY // block))


@launcher("qtype")
def launch(
    x: jax.Array,
    columns: jax.Array | None = None,
    *,
    qtype: str = QTYPE,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns (x̂ [..., in], s f32[...]) for x [..., in] and columns [in]."""
    *lead, in_features = x.shape
    rows, lane = x.size // in_features, math.gcd(in_features, MAX_SIDE)
    width = in_features // lane
    tile_rows = max(1, config.tile_bytes // (in_features * x.dtype.itemsize))
    row_tiles = pl.cdiv(rows, tile_rows)
    blocks = min(row_tiles, sm_count * config.blocks_per_sm)
    steps = pl.cdiv(row_tiles, blocks)
    buffers = min(config.stages, 2)  # of codes
    view = (rows, width, lane)
    chunk_width = math.gcd(in_features, MAX_CHUNK) // lane
    chunks = [pl.ds(start, chunk_width) for start in range(0, width, chunk_width)]
    inverse_bound = 1 / bound(qtype)  # XLA multiplies by the same number.
    # The layout of x's chunks, too. JAX would take minutes to find it.
    shape = chunk_width, lane
    adjacent = plgpu.Layout.WG_STRIDED(shape, vec_size=math.prod(shape) // THREADS)
    operands = [x.reshape(view)]
    if columns is not None:
        columns = columns if columns.dtype == jnp.bfloat16 else columns.astype(jnp.float32)
        operands.append(columns.reshape(view[1:]))
    is_kept = columns is not None and columns.nbytes <= 4 * THREADS * COLUMN_REGISTERS

    # x_gmem, codes_gmem [rows, width, lane]; columns_gmem [width, lane]; scales_gmem [all tiles'
    # rows]
    def kernel(x_gmem, *refs):
        *columns_gmem, codes_gmem, scales_gmem, codes_smem = refs
        block = lax.axis_index("block")

        def load_columns(chunk):
            return plgpu.load(columns_gmem[0].at[chunk], layout=adjacent, optimized=False)

        kept = [load_columns(chunk) for chunk in chunks] if is_kept else [None] * len(chunks)

        def scaled(x_smem, row):
            """Yields every chunk of a row, and its numbers times the columns."""
            for chunk, columns in zip(chunks, kept, strict=True):
                wide = x_smem[row, chunk].astype(jnp.float32)
                if columns_gmem:
                    columns = load_columns(chunk) if columns is None else columns
                    wide = wide * columns.astype(jnp.float32)
                yield chunk, wide

        def step(indices, x_smem):  # [tile_rows, width, lane]
            (index,) = indices
            buffer = lax.rem(index, buffers)
            plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
            first = (block + index * blocks) * tile_rows
            for row in range(tile_rows):
                largest = jnp.zeros((chunk_width, lane), jnp.float32)
                for _, numbers in scaled(x_smem, row):
                    largest = jnp.maximum(largest, jnp.abs(numbers))
                scale = jnp.maximum(jnp.max(largest) * inverse_bound, LEAST)
                inverse = 1 / scale  # once, as a quotient takes several instructions
                for chunk, numbers in scaled(x_smem, row):
                    codes_smem[buffer, row, chunk] = (numbers * inverse).astype(qtype)
                scales_gmem[first + row] = scale
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(codes_smem.at[buffer], codes_gmem.at[pl.ds(first, tile_rows)])

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
            jax.ShapeDtypeStruct(view, qtype),
            jax.ShapeDtypeStruct((steps * blocks * tile_rows,), jnp.float32),
        ],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((buffers, tile_rows, width, lane), qtype)],
        kernel_name="dora_row_codes",
    )(*operands)
    return codes.reshape(x.shape), scales[:rows].reshape(lead)
