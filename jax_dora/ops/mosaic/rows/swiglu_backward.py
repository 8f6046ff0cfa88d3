"""The gradient of `jax_dora.ops.swiglu` (SwiGLU and two composes), with all sums over rows.

    dh, gate, up  [rows, out]  bf16 or fp16      g, b of gate and of up  f32[out]
    y₁ = g₁∘gate + b₁    y₂ = g₂∘up + b₂    σ = sigmoid(y₁)
    d₁ = dh∘y₂∘σ∘(1 + y₁∘(1-σ))             d₂ = dh∘y₁∘σ
    d_gate = g₁∘d₁    d_up = g₂∘d₂          [rows, out]  dh's dtype
    d_g₁ = Σ_rows d₁∘gate    d_g₂ = Σ_rows d₂∘up    f32[out]
    d_b₁ = Σ_rows d₁         d_b₂ = Σ_rows d₂       f32[out], if wanted
    h = y₁∘σ∘y₂                             [rows, out]  dh's dtype, if wanted

σ is computed as rsqrt(1 + exp(-y₁))², with rsqrt and exp of the special function unit. Its relative
error is a few u32 (2⁻²⁴), plus u32·|y₁| from exp's argument. This is accurate enough for 16-bit
results; fp32 is not supported for this reason.

Elements: 3 · rows · out read, 2 · rows · out written, and 1 with h. The floor is bytes / copy rate.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.rows import elementwise
from jax_dora.ops.mosaic.rows.elementwise import Config, lane


def refuses(rows: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why the kernel does not support [rows, out] of `dtype`, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)} is neither bfloat16 nor float16"
    return elementwise.refuses(rows, out, dtype)


def wins(rows: int, out: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was no slower than XLA (H200, b015f34, `benchmarks ops`)."""
    return rows >= 512 and out >= 2048 and rows * out >= 2**21 and lane(out) >= 8


def config(rows: int, out: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the config for [rows, out] of `dtype` (H200, `benchmarks tune`)."""
    return Config(tile_bytes=4096, stages=2, blocks_per_sm=3)


@launcher("want_bias", "scaled", "want_result")
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
    scaled: bool = False,
    want_result: bool = False,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, ...]:
    """Returns (d_gate, d_up, d_gate_g, d_up_g), followed by (d_gate_bias, d_up_bias) if
    `want_bias`, for dh, gate, up [..., out]; with `want_result`, h comes third. If `scaled`, gate
    and up are y₁ and y₂ above, without biases, and d_g₁ and d_g₂ are multiplied by g₁ and g₂."""

    def row_function(operands, vectors, _):
        (dh, gate, up), (g1, b1, g2, b2) = operands, vectors
        y1, y2 = (gate, up) if scaled else (g1 * gate + b1, g2 * up + b2)
        root = lax.rsqrt(1.0 + jnp.exp(-y1))
        sigma = root * root
        weighted = dh * sigma
        d1 = weighted * y2 * (1.0 + y1 * (1.0 - sigma))
        d2 = weighted * y1
        results = [g1 * d1, g2 * d2] + [y1 * sigma * y2] * want_result
        return results, [d1 * gate, d2 * up, d1, d2][: 4 if want_bias else 2]

    zeros = jnp.zeros_like(gate_g, jnp.float32)
    vectors = [zeros if v is None else v for v in (gate_g, gate_bias, up_g, up_bias)]
    tensors, sums = elementwise.row_kernel(
        row_function,
        [dh, gate, up],
        vectors,
        jnp.float32(1),
        outputs=3 if want_result else 2,
        sums=4 if want_bias else 2,
        config=config,
        sm_count=sm_count,
        kernel_name="dora_swiglu_backward",
        approx_math=True,
    )
    return *tensors, *sums
