"""Rotary position embedding (arXiv 2104.09864), in the half-split layout of Llama."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_dora.lm.models.config import Rope


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns the frequencies theta^(-2i/head_dim), scaled as `rope` says: f32[head_dim / 2].

    Those of kind "dynamic" are for texts within its original_length.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    unscaled = np.float32(1) / np.float32(rope.theta) ** exponent
    if rope.kind in ("default", "dynamic"):
        return unscaled
    if rope.kind == "linear":
        return unscaled / np.float32(rope.factor)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, unscaled)
    turns = rope.original_length * unscaled / np.float32(2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1) if low < high else turns >= low
    return (unscaled * (kept + (1 - kept) / rope.factor)).astype(np.float32)


def _yarn(rope: Rope, head_dim: int, unscaled: np.ndarray) -> np.ndarray:
    """Returns YaRN's frequencies: a ramp over their indices from kept to divided ones."""

    def index(turns: float) -> float:
        """Returns the index of the frequency with that many turns within original_length."""
        length = rope.original_length / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / (high - low or 0.001)
    divided = np.clip(ramp, 0, 1)
    return (unscaled * (1 - divided + divided / rope.factor)).astype(np.float32)


def angles(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and the sine of position x frequency.

    Both are f32[batch, time, 1, head_dim / 2]; `positions` are i32[batch, time]. For kind
    "dynamic", the length of a text is the largest of its row's positions plus 1.
    """
    freqs = jnp.asarray(frequencies(rope, head_dim))[None, None, None, :]
    if rope.kind == "dynamic":
        length = jnp.max(positions, axis=1)[:, None, None, None].astype(jnp.float32) + 1
        excess = rope.factor * jnp.maximum(length / rope.original_length - 1, 0)
        # theta becomes theta * (1 + excess)^(head_dim / (head_dim - 2)).
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim - 2)
        freqs = freqs * (1 + excess) ** -exponent[None, None, None, :]
    angle = positions[:, :, None, None].astype(jnp.float32) * freqs
    return rope.attention_factor * jnp.cos(angle), rope.attention_factor * jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates each pair (x_i, x_{i + head_dim/2}) of x [batch, time, heads, head_dim]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x.dtype)
