"""Attention to any tokens that a mask allows."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops import choose


def attend(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """Returns `jax.nn.dot_product_attention`, of float16 on a CPU too.

    XLA has none of its products there, of float16 into float32 (jax 0.12): they are of float32.
    """
    is_wide = q.dtype == jnp.float16 and choose.target().platform == "cpu"
    wide = [one.astype(jnp.float32) if is_wide else one for one in (q, k, v)]
    return jax.nn.dot_product_attention(*wide, **options).astype(q.dtype)
