"""The product of rows and a frozen matrix, forward in FP8 and backward in the matrix' dtype.

    x W ≈ (x̂ Ŵ) ∘ (s_x ⊗ s_w)      dx = dy Wᵀ

as in `row_scaled`, with codes that are made of W once for many products.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_dora.ops import row_scaled
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.rounding import make, round_to


class ForwardCodes(NamedTuple):
    """The codes float8_e4m3fn[out, in] of a matrix, with one scale, f32[out], for each output. The
    features that a product sums over are contiguous, as the tensor cores read them."""

    codes: jax.Array
    scales: jax.Array


def forward_codes(kernel: jax.Array) -> ForwardCodes:
    """Returns the codes of a kernel [in, out], which have no gradient."""
    rows = jax.lax.stop_gradient(kernel).T
    coded = round_to(rows, row_scaled.QTYPE, (1, rows.shape[1]), jnp.float32)
    return ForwardCodes(coded.qvalue, coded.scale[:, 0])


@jax.custom_vjp
def multiply_forward(x: jax.Array, kernel: jax.Array, coded: ForwardCodes) -> jax.Array:
    """Returns the product f32[rows, out] of x [rows, in] and a kernel [in, out] by the kernel's
    codes. The gradient of x is the product with the kernel itself; the others have none."""
    weight = make(coded.codes.T, coded.scales[None], row_scaled.QTYPE)
    return row_scaled.sums(row_scaled.coded(x), weight, Shard()).scaled


def _forward(
    x: jax.Array, kernel: jax.Array, coded: ForwardCodes
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return multiply_forward(x, kernel, coded), (x[:0], kernel)


def _backward(kept: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, None, None]:
    like, kernel = kept
    return jnp.matmul(d.astype(like.dtype), kernel.astype(like.dtype).T), None, None


multiply_forward.defvjp(_forward, _backward)
