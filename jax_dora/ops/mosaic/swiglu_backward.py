"""The gradient of `jax_dora.ops.swiglu`: SwiGLU's and two composes', with all sums over the rows.

    dh, gate, up  [rows, out]  bf16 or fp16      g, b of gate and of up  f32[out]
    y₁ = g₁∘gate + b₁    y₂ = g₂∘up + b₂    σ = sigmoid(y₁)
    d₁ = dh∘y₂∘σ∘(1 + y₁∘(1-σ))             d₂ = dh∘y₁∘σ
    d_gate = g₁∘d₁    d_up = g₂∘d₂          [rows, out]  dh's dtype
    d_g₁ = Σ_rows d₁∘gate    d_g₂ = Σ_rows d₂∘up    f32[out]
    d_b₁ = Σ_rows d₁         d_b₂ = Σ_rows d₂       f32[out], where they are wanted

As compose's backward kernel in all else: each thread block keeps the sums of its features in
registers, with Kahan's compensation, and writes one row of partials, which XLA adds up.

σ = rsqrt(1 + exp(-y₁))², both by the special function unit: relative errors of a few u32 (2⁻²⁴) and
of exp's argument, u32·|y₁|. That suits 16-bit results, and is why fp32 ones are refused.

Bytes: reads 3 · rows · out, writes 2. Memory is the floor: bytes / copy rate.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic import elementwise
from jax_dora.ops.mosaic.elementwise import Config, lane
from jax_dora.ops.mosaic.launch import launcher

# [rows, out] operands and results; vectors over the features.
INPUTS, OUTPUTS, VECTORS = 3, 2, 4


def refuses(rows: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why [rows, out] of `dtype` is not taken, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)} is neither bfloat16 nor float16"
    return elementwise.refuses(rows, out, dtype)


def wins(rows: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was no slower than XLA (H200, b015f34, `benchmarks ops`)."""
    return rows >= 512 and out >= 2048 and rows * out >= 2**21 and lane(out) >= 8


def config(rows: int, out: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the launch knobs for [rows, out] of `dtype` (H200, `benchmarks tune`)."""
    return Config(tile_bytes=4096, stages=2, blocks_per_sm=3)


@launcher("want_bias")
def launch(
    dh: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    gate_g: jax.Array,
    up_g: jax.Array,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    *,
    want_bias: bool = False,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, ...]:
    """Returns (d_gate, d_up, d_gate_g, d_up_g), and (d_gate_bias, d_up_bias) where they are wanted,
    for dh, gate, up [..., out]."""
    shape, dtype, out = dh.shape, dh.dtype, dh.shape[-1]
    t = elementwise.tile(dh.size // out, out, dtype, config, sm_count)
    sum_count = 4 if want_bias else 2

    def kernel(*refs):
        operands_gmem, vectors_gmem, results_gmem = refs[:3], refs[3], refs[4:6]
        sums_gmem, (vectors_smem, out_smem, barrier) = refs[6], refs[7:]
        row_block, column = lax.axis_index("row"), lax.axis_index("column")
        columns = pl.ds(column * t.feature_block[0], t.feature_block[0])
        plgpu.copy_gmem_to_smem(vectors_gmem.at[:, columns], vectors_smem, barrier)
        plgpu.barrier_wait(barrier)
        g1, b1, g2, b2 = (vectors_smem[i] for i in range(VECTORS))  # [features]

        def step(indices, dh_smem, gate_smem, up_smem, sums):  # [tile_rows, features]
            (index,) = indices
            slot = lax.rem(index, 2)
            tile_sums = [jnp.zeros_like(g1)] * sum_count
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            for row in range(t.tile_rows):
                dh = dh_smem[row].astype(jnp.float32)
                gate = gate_smem[row].astype(jnp.float32)
                up = up_smem[row].astype(jnp.float32)
                y1 = g1 * gate + b1
                root = lax.rsqrt(1.0 + jnp.exp(-y1))
                sigma = root * root
                weighted = dh * sigma
                d1 = weighted * (g2 * up + b2) * (1.0 + y1 * (1.0 - sigma))
                d2 = weighted * y1
                tile_sums[0] = tile_sums[0] + d1 * gate
                tile_sums[1] = tile_sums[1] + d2 * up
                if want_bias:
                    tile_sums[2:] = tile_sums[2] + d1, tile_sums[3] + d2
                out_smem[slot, 0, row] = (g1 * d1).astype(dtype)
                out_smem[slot, 1, row] = (g2 * d2).astype(dtype)
            plgpu.commit_smem()
            rows_here = pl.ds((row_block + index * t.row_blocks) * t.tile_rows, t.tile_rows)
            for i, gmem in enumerate(results_gmem):
                plgpu.copy_smem_to_gmem(
                    out_smem.at[slot, i], gmem.at[rows_here, columns], commit_group=False
                )
            plgpu.commit_smem_to_gmem_group()
            return tuple(map(elementwise.add_compensated, sums, tile_sums))

        block = plgpu.BlockSpec(
            (t.tile_rows, *t.feature_block),
            lambda index: (row_block + index * t.row_blocks, column, 0),
        )
        nothing = (jnp.zeros_like(g1), jnp.zeros_like(g1))
        sums = plgpu.emit_pipeline(
            step,
            grid=(t.steps,),
            in_specs=[block] * INPUTS,
            max_concurrent_steps=config.stages,
            init_carry=(nothing,) * sum_count,
        )(*operands_gmem)
        for i, (total, _) in enumerate(sums):
            vectors_smem[i] = total
            plgpu.commit_smem()
            # An integer index in front, into a padded array: see the compose's backward kernel.
            plgpu.copy_smem_to_gmem(vectors_smem.at[i], sums_gmem.at[i, row_block, columns])
        plgpu.wait_smem_to_gmem(0)

    zeros = jnp.zeros_like(gate_g, jnp.float32)
    vectors = (gate_g, gate_bias, up_g, up_bias)
    vectors = jnp.stack([zeros if v is None else v.astype(jnp.float32) for v in vectors])
    padded = t.column_blocks * t.feature_block[0]
    d_gate, d_up, sums = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(t.view, dtype)] * OUTPUTS
        + [jax.ShapeDtypeStruct((sum_count, t.row_blocks, padded, t.lane), jnp.float32)],
        grid=(t.row_blocks, t.column_blocks),
        grid_names=("row", "column"),
        scratch_types=[
            plgpu.SMEM((VECTORS, *t.feature_block), jnp.float32),
            plgpu.SMEM((2, OUTPUTS, t.tile_rows, *t.feature_block), dtype),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="dora_swiglu_backward",
    )(
        *(operand.reshape(t.view) for operand in (dh, gate, up)),
        vectors.reshape(VECTORS, *t.view[1:]),
    )
    sums = sums.sum(1).reshape(sum_count, -1)[:, :out]
    return d_gate.reshape(shape), d_up.reshape(shape), *sums
