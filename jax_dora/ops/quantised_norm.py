"""The norm of an adapted kernel that is quantised, as XLA computes it: block by block of W's rows.

    ‖W + sAB‖² = Σ_blocks Σ_rows (W + s·A B)²     W a block, dequantised

No [in, out] array of floats is made: a block, its share of A B and their sum are all there is,
`BLOCK_ELEMENTS` each, in fp32 (fp64 for fp64 operands). Nothing cancels, so there is no clamp.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops import quantised
from jax_dora.ops.compose import accumulator
from jax_dora.ops.operands import Adapted

BLOCK_ELEMENTS = 1 << 20


def squared_norm(operands: Adapted, *, is_zero: bool) -> jax.Array:
    """Returns Σ_in (W + s·A B)² of a quantised W: f32[out] (f64 if an operand is fp64)."""
    kernel, lora_a, lora_b, scale = operands
    dtype = accumulator(kernel.scale.dtype, lora_a.dtype, lora_b.dtype)
    in_features, out = kernel.shape
    count = quantised.rows_of_block(kernel, BLOCK_ELEMENTS)
    s = scale.astype(dtype)

    def of_rows(start: Any, count: int) -> jax.Array:
        block = quantised.dequantise(quantised.rows(kernel, start, count), dtype)
        if not is_zero:
            a = lax.dynamic_slice_in_dim(lora_a, start, count)
            block = block + s * _product(a, lora_b, dtype)
        return jnp.sum(jnp.square(block), axis=0)

    def step(total: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return total + of_rows(number * count, count), None

    blocks = in_features // count
    total, _ = lax.scan(step, jnp.zeros(out, dtype), jnp.arange(blocks, dtype=jnp.int32))
    if remaining := in_features - blocks * count:
        total = total + of_rows(blocks * count, remaining)
    return total


def _product(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """Returns a b with products that are exact in `dtype`, or rounded in it."""
    if a.dtype != b.dtype or a.dtype.itemsize != 2:
        a, b = a.astype(dtype), b.astype(dtype)
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)
