"""The adapters of one projection in slots, and what each row of a batch takes of its slot.

Row by row y = g[id]∘(base + s[id]·x A[id] B[id]) + bias.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """The adapters of one projection, in slots.

    Attributes:
      lora_a: [slots, rank, in], zero beyond the rank that an adapter has.
      lora_b: [slots, rank, out], likewise.
      g: f32[slots, out], magnitude over norm; 1 for LoRA; NaN in a slot without an adapter. None
        where all adapters are LoRA.
      scale: f32[slots].
      rank: i32[slots], of each adapter; 0 where it leaves the projection alone.
    """

    lora_a: Any
    lora_b: Any
    g: Any
    scale: Any
    rank: Any


def checked_ids(ids: jax.Array, slots: int) -> jax.Array:
    """Returns i32 ids in which `slots` stands for each that is below -1 or has no slot.

    Compared in their own dtype: a cast could make another adapter's of a wrong one.
    """
    info = jnp.iinfo(ids.dtype)
    valid = jnp.ones(ids.shape, bool)
    if info.max >= slots:
        valid = valid & (ids < jnp.asarray(slots, ids.dtype))
    if info.min < -1:
        valid = valid & (ids >= jnp.asarray(-1, ids.dtype))
    return jnp.where(valid, ids.astype(jnp.int32), slots)


class Rows(NamedTuple):
    """The vectors and numbers that each row of a batch takes of its slot; of row -1 those that
    change nothing.

    Attributes:
      slot: i32[batch].
      g: f32[batch, out].
      scale: f32[batch]; NaN where there is no such slot.
    """

    slot: jax.Array
    g: jax.Array
    scale: jax.Array


def _rows_of(slots: Slots, ids: jax.Array, first: jax.Array, count: int, dtype: Any) -> Rows:
    safe = first + jnp.clip(ids, 0, count - 1)
    of_lora = jnp.ones((*ids.shape, slots.lora_b.shape[-1]), dtype)
    g = of_lora if slots.g is None else slots.g[safe].astype(dtype)
    scale = jnp.where(ids < count, slots.scale[safe], jnp.nan).astype(dtype)
    return Rows(safe, jnp.where((ids < 0)[:, None], 1, g), jnp.where(ids < 0, 0, scale))


# Compiled, so that `jax.debug_nans` does not see the NaN of an empty slot that no row takes.
rows_of: Callable[..., Rows] = jax.jit(_rows_of, static_argnames=("count", "dtype"), inline=True)


def composed(base: jax.Array, lora: jax.Array, rows: Rows, bias: jax.Array | None) -> jax.Array:
    """Returns g∘(base + s·lora) + bias; base + bias, bit for bit, where g is 1 and s is 0."""
    g, scale = rows.g[:, None], rows.scale[:, None, None]
    wide = base.astype(g.dtype)
    # A sum with zero turns -0 into 0, and what is not finite into NaN.
    y = jnp.where((g == 1) & (scale == 0), wide, g * (wide + scale * lora.astype(g.dtype)))
    if bias is not None:
        y = y + bias.astype(g.dtype)[None, None]
    return y.astype(base.dtype)
