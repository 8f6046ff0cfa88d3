"""Attention to any tokens that a mask allows."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops import choose


def attend(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """Returns `jax.nn.dot_product_attention`. For float16 on a CPU it is taken in float32, since
    XLA has no products of float16 into float32 there (jax 0.12)."""
    is_wide = q.dtype == jnp.float16 and choose.target().platform == "cpu"
    wide = [one.astype(jnp.float32) if is_wide else one for one in (q, k, v)]
    return jax.nn.dot_product_attention(*wide, **options).astype(q.dtype)
