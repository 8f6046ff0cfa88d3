"""A whole adapted projection in training with dropout, in two conventions.

With d = dropout(x), base = xW and g from `magnitude_scale`:

    "adapter":  y = base + ((g-1)∘base + g∘(s·dAB)) + bias        LoRA's: only the adapter's x
    "input":    y = base + ((g-1)∘dW + g∘(s·dAB)) + bias          PEFT's: x for all of ΔY

The second multiplies by the kernel twice.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_dora.ops import check
from jax_dora.ops.compose import compose, compose_delta
from jax_dora.ops.norm import magnitude_scale


def dora_linear_with_dropout(
    x: jax.Array,
    dropped: jax.Array,
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    magnitude: jax.Array,
    scale: ArrayLike,
    *,
    mode: str,
    norm: jax.Array,
    bias: jax.Array | None = None,
    implementation: str | None = None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """As `dora_linear`, with `dropped` in x's place wherever `mode` says.

    Args:
      x, dropped: [..., in], before and after dropout.
      kernel, lora_a, lora_b, magnitude, scale, bias, norm, implementation, precision: as
        `dora_linear`'s.
      mode: "adapter" or "input".

    Returns:
      [..., out] in the dtype that x and kernel promote to.

    Raises:
      TypeError, ValueError, NotImplementedError: as `dora_linear`; an unknown mode.
    """
    if mode not in ("adapter", "input"):
        raise ValueError(f"mode is {mode!r}; expected 'adapter' or 'input'")
    check.adapter(kernel, lora_a, lora_b)
    check.is_float("x", x)
    check.has_shape("x", x, (*x.shape[:-1], kernel.shape[0]), "[..., in]")
    check.has_shape("dropped", dropped, x.shape, "x's shape")
    dtype = jnp.promote_types(x.dtype, kernel.dtype)

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a.astype(dtype), b.astype(dtype), precision=precision)

    g = magnitude_scale(magnitude, norm, dtype)
    base = dot(x, kernel)
    lora = dot(dot(dropped, lora_a), lora_b)
    if mode == "adapter":
        y = compose(base, lora, g, scale, implementation=implementation)
    else:
        delta = compose_delta(dot(dropped, kernel), lora, g, scale, implementation=implementation)
        y = base + delta
    return y if bias is None else y + bias.astype(dtype).reshape((1,) * (y.ndim - 1) + (-1,))
