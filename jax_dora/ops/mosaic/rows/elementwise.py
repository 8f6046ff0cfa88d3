"""The elementwise kernel over [rows, out] of compose, its backward pass and SwiGLU's backward pass.

A thread block processes one block of output features and loops over rows. g, and in the backward
pass the sums over rows, stay in its registers.

- [rows, out] is viewed as [rows, out/lane, lane], where lane is the largest power of two that
  divides out, at most 256, because a TMA box has at most 256 elements per axis, and at most
  `config.features`.
- A block of features has at most `THREADS` * 8 features, [features/lane, lane]. Each of the 128
  threads holds 8 adjacent features, 16 bytes of bf16, so that shared memory is accessed at full
  width without bank conflicts. With fewer features the threads compute several rows at a time.
- A tile has `tile_rows` rows of a block of features. The thread blocks with the same features take
  tiles in turn, so that they read neighbouring memory at the same time.
- Beyond the last row or feature, TMA reads zeros and writes nothing.

Sums over rows take two steps: each thread block sums its rows, in registers and at last over its
threads, and writes one row of partial sums, and XLA adds the partial sums. There are no atomics, so
the order of additions is fixed. A thread may add a few thousand rows, so tiles are added with
Kahan's compensation. The error is then that of the few additions within a tile and of threads, for
any number of rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper import limits

THREADS = 128
THREAD_FEATURES = 8
MAX_LANE = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning parameters.

    Attributes:
      tile_bytes: the bytes of one operand's tile. With 8 KiB, two operands and four stages, 64 KiB
        are in flight per thread block, twice what the memory's latency requires.
      stages: the number of pipeline stages.
      blocks_per_sm: the number of thread blocks per multiprocessor: one computes while another
        waits for memory.
      features: the number of features of a thread block, 1024 or less by a power of two.
      most_sums: the largest number of partial sums of a feature.
    """

    tile_bytes: int = 8192
    stages: int = 4
    blocks_per_sm: int = 2
    features: int = THREADS * THREAD_FEATURES
    most_sums: int = 2**31 - 1


def lane(out: int) -> int:
    """Returns the largest power of two up to 256 that divides `out`."""
    return math.gcd(out, MAX_LANE)


def refuses(rows: int, out: int, dtype) -> str | None:
    """Returns why the kernel does not support [rows, out] of `dtype`, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"dtype {jnp.dtype(dtype)} is not bfloat16, float16 or float32"
    if rows == 0:
        return "there are no rows"
    if out == 0 or out % limits.ALIGNMENT:
        return f"out = {out} is not a multiple of {limits.ALIGNMENT} (rows of 16 bytes)"
    return None


def row_kernel(
    row_function: Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]],
    inputs: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    scale: jax.Array,
    *,
    outputs: int,
    sums: int = 0,
    config: Config,
    sm_count: int,
    kernel_name: str,
    approx_math: bool = False,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns (outputs, sums): arrays like the inputs, and sums over rows f32[out].

    Args:
      row_function: `(inputs, vectors, scale) -> (outputs, terms of the sums)` for the rows that the
        threads compute at once, [rows, features/lane, lane] each, in fp32.
      inputs: arrays [..., out] of the same shape and dtype.
      vectors: arrays [out].
      scale: f32[].
      outputs, sums: the numbers of outputs and sums.
      config, sm_count: see `choose.Choice`.
      kernel_name: the name that profilers show.
      approx_math: compute functions such as exp with the special function unit.
    """
    shape, dtype, count = inputs[0].shape, inputs[0].dtype, len(inputs)
    out, width = shape[-1], min(lane(shape[-1]), config.features)
    rows, block = inputs[0].size // out, (config.features // width, width)
    # The rows that the threads compute at a time.
    at_once = THREADS * THREAD_FEATURES // config.features
    held = at_once, *block
    layout = plgpu.Layout.WG_STRIDED(held, vec_size=THREAD_FEATURES)
    view = rows, out // width, width
    tile_rows = max(at_once, config.tile_bytes // (config.features * dtype.itemsize))
    column_blocks, row_tiles = pl.cdiv(out, config.features), pl.cdiv(rows, tile_rows)
    row_blocks = max(1, sm_count * config.blocks_per_sm // column_blocks)
    row_blocks = min(row_tiles, row_blocks, config.most_sums if sums else row_blocks)

    def kernel(*refs):
        # [rows, out/lane, lane] each; [vectors, out/lane, lane], [1]
        inputs_gmem, (vectors_gmem, scale_gmem) = refs[:count], refs[count : count + 2]
        *results_gmem, vectors_smem, out_smem, barrier = refs[count + 2 :]
        # [rows, out/lane, lane] each; [sums, row_blocks, padded out/lane, lane]
        outputs_gmem, sums_gmem = results_gmem[:outputs], results_gmem[outputs:]
        row_block, column = lax.axis_index("row"), lax.axis_index("column")
        columns = pl.ds(column * block[0], block[0])
        for i in range(len(vectors)):
            for row in range(at_once):
                plgpu.copy_gmem_to_smem(
                    vectors_gmem.at[i, columns], vectors_smem.at[i, row], barrier
                )
        plgpu.barrier_wait(barrier)
        # [at_once, features/lane, lane] each
        block_vectors = [plgpu.load(vectors_smem.at[i], layout=layout) for i in range(len(vectors))]
        s, zero = scale_gmem[0], plgpu.layout_cast(jnp.zeros(held, jnp.float32), layout)

        def step(indices, *refs):
            # Each tile is [tile_rows, features/lane, lane].
            (index,), (*tiles_smem, totals) = indices, refs
            buffer, tile_sums = lax.rem(index, 2), [zero] * sums
            if outputs:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            for first in range(0, tile_rows, at_once):
                of_threads = pl.ds(first, at_once)
                inputs = [
                    plgpu.load(tile_smem.at[of_threads], layout=layout).astype(jnp.float32)
                    for tile_smem in tiles_smem
                ]
                row_outputs, terms = row_function(inputs, block_vectors, s)
                tile_sums = [total + term for total, term in zip(tile_sums, terms, strict=True)]
                for i, value in enumerate(row_outputs):
                    out_smem[buffer, i, of_threads] = value.astype(dtype)
            # Needed without outputs too: TMA must not refill a buffer that is still being read.
            plgpu.commit_smem()
            if outputs:
                tile = pl.ds((row_block + index * row_blocks) * tile_rows, tile_rows)
                for i, gmem in enumerate(outputs_gmem):
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[buffer, i], gmem.at[tile, columns], commit_group=False
                    )
                plgpu.commit_smem_to_gmem_group()
            return tuple(map(_add_compensated, totals, tile_sums))

        tile = plgpu.BlockSpec(
            (tile_rows, *block), lambda index: (row_block + index * row_blocks, column, 0)
        )
        run_pipeline: Callable[..., Any] = plgpu.emit_pipeline(
            step,
            grid=(pl.cdiv(row_tiles, row_blocks),),
            in_specs=[tile] * count,
            max_concurrent_steps=config.stages,
            init_carry=((zero, zero),) * sums,
        )
        for i, (total, _) in enumerate(run_pipeline(*inputs_gmem)):
            vectors_smem[i] = total
            plgpu.commit_smem()
            if at_once > 1:
                whole = plgpu.Layout.WG_STRIDED(block, vec_size=config.features // THREADS)
                parts = [
                    plgpu.load(vectors_smem.at[i, row], layout=whole) for row in range(at_once)
                ]
                plgpu.commit_smem()  # Nobody writes before all have read.
                vectors_smem[i, 0] = functools.reduce(jnp.add, parts)
                plgpu.commit_smem()
            # The output is padded to whole blocks of features: with integer indices TMA sees a
            # single merged axis, and would write past this row instead of clipping.
            plgpu.copy_smem_to_gmem(vectors_smem.at[i, 0], sums_gmem[0].at[i, row_block, columns])
        plgpu.wait_smem_to_gmem(0)

    partials = (sums, row_blocks, column_blocks * block[0], width)
    results = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(view, dtype)] * outputs
        + [jax.ShapeDtypeStruct(partials, jnp.float32)] * (sums > 0),
        grid=(row_blocks, column_blocks),
        grid_names=("row", "column"),
        scratch_types=[
            plgpu.SMEM((max(len(vectors), sums), *held), jnp.float32),  # vectors, then sums
            plgpu.SMEM((2, max(outputs, 1), tile_rows, *block), dtype),  # outputs
            plgpu.Barrier(num_arrivals=len(vectors) * at_once),
        ],
        compiler_params=dataclasses.replace(limits.STATED_LAYOUTS, approx_math=approx_math),
        kernel_name=kernel_name,
    )(
        *(array.reshape(view) for array in inputs),
        jnp.stack([vector.astype(jnp.float32) for vector in vectors]).reshape(-1, *view[1:]),
        scale.astype(jnp.float32).reshape(1),
    )
    totals = results[outputs].sum(1).reshape(sums, -1)[:, :out] if sums else ()
    return [array.reshape(shape) for array in results[:outputs]], list(totals)


def _add_compensated(
    sums: tuple[jax.Array, jax.Array], term: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (total, accumulated rounding error) after adding `term` (Kahan, CACM 8, 1965)."""
    total, excess = sums
    term = term - excess
    new = total + term
    return new, (new - total) - term
