"""Compose forward: y = g∘(base + s·lora), or ΔY = (g-1)∘base + g∘(s·lora).

    base, lora  [rows, out]  bf16, fp16 or fp32      g  f32[out]      s  f32[]
    y           [rows, out]  base's dtype            inner = base + s·lora  [rows, out]  (optional)

Bytes: reads 2 · rows · out, writes 1 (2 with inner), each of the dtype's size; about ten fp32
operations an element, so memory is the floor: bytes / copy rate.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import elementwise
from jax_dora.ops.mosaic.elementwise import Config
from jax_dora.ops.mosaic.elementwise import refuses as refuses
from jax_dora.ops.mosaic.launch import launcher


def wins(rows: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns False: XLA was as fast at every size."""
    return False


def config(rows: int, out: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the launch knobs for [rows, out] of `dtype`."""
    return Config()


@launcher("delta", "want_inner")
def launch(
    base: jax.Array,
    lora: jax.Array,
    g: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    delta: bool,
    want_inner: bool,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y or ΔY, inner or None) of base, lora [..., out]; adds bias [out] if given."""
    shape, dtype = base.shape, base.dtype
    out = shape[-1]
    rows = base.size // out
    t = elementwise.tile(rows, out, dtype, config, sm_count)
    outputs = 2 if want_inner else 1
    vectors = [g] if bias is None else [g, bias]

    def kernel(base_gmem, lora_gmem, scale_gmem, *refs):
        vectors_gmem, refs = refs[: len(vectors)], refs[len(vectors) :]
        out_gmem, (vectors_smem, out_smem, barrier) = refs[:outputs], refs[outputs:]
        row_block, column = lax.axis_index("row"), lax.axis_index("column")
        columns = pl.ds(column * t.feature_block[0], t.feature_block[0])
        for i, vector_gmem in enumerate(vectors_gmem):
            plgpu.copy_gmem_to_smem(vector_gmem.at[columns], vectors_smem.at[i], barrier)
        plgpu.barrier_wait(barrier)
        g, *bias = (vectors_smem[i] for i in range(len(vectors)))  # [features]
        g_minus_1, s = g - 1.0, scale_gmem[0]

        def step(indices, base_smem, lora_smem):  # [tile_rows, features]
            (index,) = indices
            slot = lax.rem(index, 2)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            for row in range(t.tile_rows):
                base = base_smem[row].astype(jnp.float32)
                scaled = s * lora_smem[row].astype(jnp.float32)
                y = g_minus_1 * base + g * scaled if delta else g * (base + scaled)
                if bias:
                    y = y + bias[0]
                out_smem[slot, 0, row] = y.astype(dtype)
                if want_inner:
                    out_smem[slot, 1, row] = (base + scaled).astype(dtype)
            plgpu.commit_smem()
            rows_here = pl.ds((row_block + index * t.row_blocks) * t.tile_rows, t.tile_rows)
            for i, gmem in enumerate(out_gmem):
                plgpu.copy_smem_to_gmem(
                    out_smem.at[slot, i], gmem.at[rows_here, columns], commit_group=False
                )
            plgpu.commit_smem_to_gmem_group()

        block = plgpu.BlockSpec(
            (t.tile_rows, *t.feature_block),
            lambda index: (row_block + index * t.row_blocks, column, 0),
        )
        plgpu.emit_pipeline(
            step, grid=(t.steps,), in_specs=[block, block], max_concurrent_steps=config.stages
        )(base_gmem, lora_gmem)
        plgpu.wait_smem_to_gmem(0)

    results = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(t.view, dtype)] * outputs,
        grid=(t.row_blocks, t.column_blocks),
        grid_names=("row", "column"),
        scratch_types=[
            plgpu.SMEM((len(vectors), *t.feature_block), jnp.float32),
            plgpu.SMEM((2, outputs, t.tile_rows, *t.feature_block), dtype),
            plgpu.Barrier(num_arrivals=len(vectors)),
        ],
        kernel_name="dora_compose",
    )(
        base.reshape(t.view),
        lora.reshape(t.view),
        scale.astype(jnp.float32).reshape(1),
        *(vector.astype(jnp.float32).reshape(t.view[1:]) for vector in vectors),
    )
    results = [r.reshape(shape) for r in results]
    return results[0], results[1] if want_inner else None
