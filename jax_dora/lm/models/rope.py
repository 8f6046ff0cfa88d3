"""Rotary position embedding (arXiv 2104.09864), in the half-split layout of Llama."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_dora.lm.models.config import Rope


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns the frequencies theta^(-2i/head_dim), scaled as `rope` says: f32[head_dim / 2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    unscaled = np.float32(1) / np.float32(rope.theta) ** exponent
    if rope.kind == "default":
        return unscaled
    if rope.kind == "linear":
        return unscaled / np.float32(rope.factor)
    turns = rope.original_length * unscaled / np.float32(2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1) if low < high else turns >= low
    return (unscaled * (kept + (1 - kept) / rope.factor)).astype(np.float32)


def angles(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and the sine of position x frequency.

    Both are f32[batch, time, 1, head_dim / 2]; `positions` are i32[batch, time].
    """
    freqs = jnp.asarray(frequencies(rope, head_dim))[None, None, None, :]
    angle = positions[:, :, None, None].astype(jnp.float32) * freqs
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates each pair (x_i, x_{i + head_dim/2}) of x [batch, time, heads, head_dim]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x.dtype)
