"""The frame of the elementwise kernels over [rows, out]: compose, its backward and SwiGLU's.

A thread block owns one block of output features, so that g stays in its registers (and so does the
sum over rows in the backward pass), and walks down the rows:

- [rows, out] is viewed as [rows, out/lane, lane], where lane is the largest power of two up to 256
  that divides out: the copy engine takes no box with a side over 256.
- A block of output features is `FEATURES` wide, [FEATURES/lane, lane]; each of the 128 threads
  holds 8 neighbouring features, 16 bytes of bf16: full-width shared-memory accesses, no bank
  conflicts, and no exchange between threads.
- A tile is `tile_rows` rows of that block. Tiles go around among the thread blocks that share a
  block of features, so that what is read at one time lies close together.
- Past the last row or feature the copy engine reads zeros and writes nothing.

Sums over the rows take two stages: each thread block sums its rows of its features in registers and
writes one row of partials; XLA adds those up. No atomics, so the order of additions is fixed. A
thread adds up to some thousand rows one after the other, so tile is added to tile with Kahan's
compensation: the error is that of one tile's few additions, whatever the number of rows.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper import ALIGNMENT

FEATURES = 1024
MAX_LANE = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch knobs.

    Attributes:
      tile_bytes: of one operand's tile. 8 KiB: two operands and four stages keep some 64 KiB in
        flight per thread block, twice what the latency of memory asks for.
      stages: tiles being fetched while one is worked on.
      blocks_per_sm: resident thread blocks, to overlap one's arithmetic with another's waiting.
    """

    tile_bytes: int = 8192
    stages: int = 4
    blocks_per_sm: int = 2


def lane(out: int) -> int:
    """Returns the largest power of two up to 256 that divides `out`."""
    return math.gcd(out, MAX_LANE)


def refuses(rows: int, out: int, dtype) -> str | None:
    """Returns why the elementwise kernels cannot take [rows, out] of `dtype`, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"dtype {jnp.dtype(dtype)} is none of bfloat16, float16, float32"
    if rows == 0:
        return "there are no rows"
    if out == 0 or out % ALIGNMENT:
        return f"out = {out} is not a multiple of {ALIGNMENT} (rows of 16 bytes)"
    return None


def row_kernel(
    of_row: Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]],
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
    """Returns `outputs` arrays like the inputs, and `sums` of f32[out] over their rows.

    Args:
      of_row: `(inputs, vectors, scale) -> (outputs, terms of the sums)` of one row, all fp32.
      inputs: [..., out], of one shape and dtype.
      vectors: [out].
      scale: f32[].
      approx_math: functions such as exp are the special function unit's.
    """
    shape, dtype, count = inputs[0].shape, inputs[0].dtype, len(inputs)
    out, width = shape[-1], lane(shape[-1])
    rows, block = inputs[0].size // out, (FEATURES // width, width)
    view = rows, out // width, width
    tile_rows = max(1, config.tile_bytes // (FEATURES * dtype.itemsize))
    column_blocks, row_tiles = pl.cdiv(out, FEATURES), pl.cdiv(rows, tile_rows)
    row_blocks = min(row_tiles, max(1, sm_count * config.blocks_per_sm // column_blocks))

    def kernel(*refs):
        inputs_gmem, (vectors_gmem, scale_gmem) = refs[:count], refs[count : count + 2]
        *results_gmem, vectors_smem, out_smem, barrier = refs[count + 2 :]
        outputs_gmem, sums_gmem = results_gmem[:outputs], results_gmem[outputs:]
        row_block, column = lax.axis_index("row"), lax.axis_index("column")
        columns = pl.ds(column * block[0], block[0])
        plgpu.copy_gmem_to_smem(vectors_gmem.at[:, columns], vectors_smem, barrier)
        plgpu.barrier_wait(barrier)
        own = [vectors_smem[i] for i in range(len(vectors))]  # [features] each
        s, zero = scale_gmem[0], jnp.zeros(block, jnp.float32)

        def step(indices, *refs):  # [tile_rows, features] each
            (index,), (*tiles_smem, totals) = indices, refs
            slot, tile_sums = lax.rem(index, 2), [zero] * sums
            if outputs:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            for row in range(tile_rows):
                found, terms = of_row([one[row].astype(jnp.float32) for one in tiles_smem], own, s)
                tile_sums = [one + term for one, term in zip(tile_sums, terms, strict=True)]
                for i, value in enumerate(found):
                    out_smem[slot, i, row] = value.astype(dtype)
            # Also where nothing is stored: the copy engine may not refill what is still being read.
            plgpu.commit_smem()
            if outputs:
                here = pl.ds((row_block + index * row_blocks) * tile_rows, tile_rows)
                for i, gmem in enumerate(outputs_gmem):
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[slot, i], gmem.at[here, columns], commit_group=False
                    )
                plgpu.commit_smem_to_gmem_group()
            return tuple(map(_add_compensated, totals, tile_sums))

        tile = plgpu.BlockSpec(
            (tile_rows, *block), lambda index: (row_block + index * row_blocks, column, 0)
        )
        walk: Callable[..., Any] = plgpu.emit_pipeline(
            step,
            grid=(pl.cdiv(row_tiles, row_blocks),),
            in_specs=[tile] * count,
            max_concurrent_steps=config.stages,
            init_carry=((zero, zero),) * sums,
        )
        for i, (total, _) in enumerate(walk(*inputs_gmem)):
            vectors_smem[i] = total
            plgpu.commit_smem()
            # In bounds, for the array is padded: with integer indices in front, the copy engine
            # sees one merged axis, and would not clip at the end of this row but write on.
            plgpu.copy_smem_to_gmem(vectors_smem.at[i], sums_gmem[0].at[i, row_block, columns])
        plgpu.wait_smem_to_gmem(0)

    partials = (sums, row_blocks, column_blocks * block[0], width)
    results = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(view, dtype)] * outputs
        + [jax.ShapeDtypeStruct(partials, jnp.float32)] * (sums > 0),
        grid=(row_blocks, column_blocks),
        grid_names=("row", "column"),
        scratch_types=[
            plgpu.SMEM((max(len(vectors), sums), *block), jnp.float32),
            plgpu.SMEM((2, max(outputs, 1), tile_rows, *block), dtype),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=approx_math),
        kernel_name=kernel_name,
    )(
        *(one.reshape(view) for one in inputs),
        jnp.stack([one.astype(jnp.float32) for one in vectors]).reshape(-1, *view[1:]),
        scale.astype(jnp.float32).reshape(1),
    )
    totals = results[outputs].sum(1).reshape(sums, -1)[:, :out] if sums else ()
    return [one.reshape(shape) for one in results[:outputs]], list(totals)


def _add_compensated(
    sums: tuple[jax.Array, jax.Array], term: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (total, what rounding has added to it so far) with `term` added; Kahan, CACM 8
    (1965)."""
    total, excess = sums
    term = term - excess
    new = total + term
    return new, (new - total) - term
