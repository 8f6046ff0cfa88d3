"""The dtypes of intermediate results, and products and casts in them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# A smaller |g| is replaced by this value: y = g∘inner would underflow and lose bits of inner.
LEAST_G = 2.0**-40


def accumulation_dtype(*dtypes: Any) -> jnp.dtype:
    """Returns the dtype for arithmetic on `dtypes`: fp64 if one of them is fp64, else fp32."""
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)


def per_feature(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Returns a vector [out] as [1, ..., out], with the dtype and number of axes of `like`."""
    return lax.expand_dims(vector.astype(like.dtype), tuple(range(like.ndim - 1)))


def divisible(g: jax.Array) -> jax.Array:
    """Returns g, with `LEAST_G` in place of smaller numbers."""
    least = lax.full_like(g, LEAST_G)
    return lax.select(lax.lt(lax.abs(g), least), least, g)


def dot_general(precision, a, b, axes, dtype=None):
    """Returns the contraction of a and b over `axes`, accumulated in fp32, in `dtype`, by default
    a's, to which b is cast. Several axes of an operand are all but the last."""
    if not isinstance(axes[0], int) and len(axes[0]) > 2:
        # Of three contracted axes that are sharded in two ways, XLA leaves out partial sums.
        first, *others = (a.shape[axis] for axis in axes[0])
        a, b = (lax.reshape(one, (first, math.prod(others), one.shape[-1])) for one in (a, b))
        axes = (0, 1), (0, 1)
    left, right = (
        [axis % operand.ndim for axis in ((ax,) if isinstance(ax, int) else ax)]
        for ax, operand in zip(axes, (a, b), strict=True)
    )
    return lax.dot_general(
        a,
        b.astype(a.dtype),
        ((left, right), ((), ())),
        precision=precision,
        preferred_element_type=dtype or a.dtype,
    )


def static_precision(precision: jax.lax.PrecisionLike) -> Any:
    """Returns `precision` as a static argument, hashable. Instead of None it is the default in the
    current context, since a product may be traced later, in another one."""
    if precision is None:
        return jax.config.jax_default_matmul_precision
    return tuple(precision) if isinstance(precision, list) else precision
