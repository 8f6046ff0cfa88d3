"""Compose backward, with the magnitude's reduction fused in two deterministic stages.

    dy, inner  [rows, out]  bf16, fp16 or fp32      g  f32[out]      s  f32[]
    d_base = g∘dy  ((g-1)∘dy for ΔY)      d_lora = s·(g∘dy)      [rows, out]  dy's dtype
    d_g    = Σ_rows dy∘inner              f32[out]

First stage: each thread block sums its rows of its features in registers and writes one row of
partials [row_blocks, out]; second stage: XLA adds those up. No atomics, so the order of additions
is fixed. A thread adds up to some thousand rows one after the other, so tile is added to tile with
Kahan's compensation: the error is that of one tile's few additions, whatever the number of rows.

Bytes: reads 2 · rows · out (1 where the magnitude is frozen, and no inner exists), writes 1 for
each of d_base and d_lora that is wanted. Memory is the floor: bytes / copy rate.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import elementwise
from jax_dora.ops.mosaic.elementwise import Config, lane
from jax_dora.ops.mosaic.elementwise import refuses as refuses
from jax_dora.ops.mosaic.launch import launcher


def wins(rows: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was no slower than XLA (H200, 1713ac4, `benchmarks ops`, and of
    many rows with 768 features `benchmarks sizes`)."""
    return (
        rows >= (725 if out >= 1024 else 4096)
        and 768 <= out <= 18770
        and rows * out >= 2**20
        and lane(out) == 256
        and jnp.dtype(dtype).itemsize == 2
    )


def config(rows: int, out: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the launch knobs for [rows, out] of `dtype` (H200, `benchmarks tune`)."""
    is_half = jnp.dtype(dtype).itemsize == 2
    if 512 <= rows <= 1448 and out >= 4096 and lane(out) == 256 and is_half:
        return Config(tile_bytes=16384, stages=2, blocks_per_sm=1)
    return Config()


@launcher("delta", "want_base", "want_lora")
def launch(
    dy: jax.Array,
    inner: jax.Array | None,
    g: jax.Array,
    scale: jax.Array,
    *,
    delta: bool,
    want_base: bool,
    want_lora: bool,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (d_base, d_lora, d_g), each None where it is not wanted; dy, inner [..., out]."""
    shape, dtype = dy.shape, dy.dtype
    out = shape[-1]
    t = elementwise.tile(dy.size // out, out, dtype, config, sm_count)
    want_g = inner is not None
    tensors = want_base + want_lora

    def kernel(dy_gmem, *refs):
        inner_gmem, refs = refs[:want_g], refs[want_g:]
        (g_gmem, scale_gmem), refs = refs[:2], refs[2:]
        out_gmem, refs = refs[:tensors], refs[tensors:]
        partial_gmem, refs = refs[:want_g], refs[want_g:]
        g_smem, out_smem, barrier = refs
        row_block, column = lax.axis_index("row"), lax.axis_index("column")
        columns = pl.ds(column * t.feature_block[0], t.feature_block[0])
        plgpu.copy_gmem_to_smem(g_gmem.at[columns], g_smem, barrier)
        plgpu.barrier_wait(barrier)
        g, s = g_smem[...], scale_gmem[0]  # [features], []
        base_factor = g - 1.0 if delta else g

        def step(indices, dy_smem, *rest):  # [tile_rows, features]
            inner_smem, (sums,) = rest[:want_g], rest[want_g:]
            (index,) = indices
            tile_sum = jnp.zeros_like(g)
            slot = lax.rem(index, 2)
            if tensors:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            for row in range(t.tile_rows):
                dy = dy_smem[row].astype(jnp.float32)
                if want_g:
                    tile_sum = tile_sum + dy * inner_smem[0][row].astype(jnp.float32)
                written = []
                if want_base:
                    written.append(base_factor * dy)
                if want_lora:
                    written.append(s * (g * dy))
                for i, value in enumerate(written):
                    out_smem[slot, i, row] = value.astype(dtype)
            # Also where nothing is stored: the copy engine may not refill what is still being read.
            plgpu.commit_smem()
            if tensors:
                rows_here = pl.ds((row_block + index * t.row_blocks) * t.tile_rows, t.tile_rows)
                for i, gmem in enumerate(out_gmem):
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[slot, i], gmem.at[rows_here, columns], commit_group=False
                    )
                plgpu.commit_smem_to_gmem_group()
            return elementwise.add_compensated(sums, tile_sum) if want_g else sums

        block = plgpu.BlockSpec(
            (t.tile_rows, *t.feature_block),
            lambda index: (row_block + index * t.row_blocks, column, 0),
        )
        d_g, _ = plgpu.emit_pipeline(
            step,
            grid=(t.steps,),
            in_specs=[block] * (1 + want_g),
            max_concurrent_steps=config.stages,
            init_carry=(jnp.zeros_like(g), jnp.zeros_like(g)),
        )(dy_gmem, *inner_gmem)
        if want_g:
            g_smem[...] = d_g
            plgpu.commit_smem()
            # In bounds, for the array is padded: with an integer index in front, the copy engine
            # sees one merged axis, and would not clip at the end of this row but write on.
            plgpu.copy_smem_to_gmem(g_smem, partial_gmem[0].at[row_block, columns])
        plgpu.wait_smem_to_gmem(0)

    out_type = [jax.ShapeDtypeStruct(t.view, dtype)] * tensors
    if want_g:
        padded = t.column_blocks * t.feature_block[0]
        out_type.append(jax.ShapeDtypeStruct((t.row_blocks, padded, t.lane), jnp.float32))
    operands = [dy.reshape(t.view)] + ([inner.reshape(t.view)] if want_g else [])
    results = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(t.row_blocks, t.column_blocks),
        grid_names=("row", "column"),
        scratch_types=[
            plgpu.SMEM(t.feature_block, jnp.float32),
            plgpu.SMEM((2, max(tensors, 1), t.tile_rows, *t.feature_block), dtype),
            plgpu.Barrier(),
        ],
        kernel_name="dora_compose_backward",
    )(
        *operands,
        g.astype(jnp.float32).reshape(t.view[1:]),
        scale.astype(jnp.float32).reshape(1),
    )
    tensors_out = iter(results)
    d_base = next(tensors_out).reshape(shape) if want_base else None
    d_lora = next(tensors_out).reshape(shape) if want_lora else None
    d_g = next(tensors_out).sum(0).reshape(-1)[:out] if want_g else None
    return d_base, d_lora, d_g
