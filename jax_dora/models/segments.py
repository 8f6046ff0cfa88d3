"""Causal attention within each of the texts that a row holds one after the other.

With a mask of [batch, 1, time, time] attention computes the whole square. cuDNN takes where each
text begins and how long it is, and computes those squares alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# A kernel of the backward pass goes over the rows once for every text that there may be: with more
# the mask is as fast (H100, 2 rows of 4096 tokens, 32 heads).
MOST = 64


class Segments(NamedTuple):
    """The texts of a batch's rows; where a row has fewer, -1 stands for those that it lacks.

    Attributes:
      lengths: i32[batch, most], in tokens.
      starts: i32[batch, most + 1], the last of which is -1.
      complete: bool[batch], whether there is room for all texts of the row.
    """

    lengths: jax.Array
    starts: jax.Array
    complete: jax.Array


def segments_of(segment_ids: jax.Array, most: int) -> Segments:
    """Returns the texts of rows: a new one begins where i32[batch, time] changes."""
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    number = jnp.pad(jnp.cumsum(changed, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    lengths = jnp.sum(number[:, :, None] == jnp.arange(most)[None, None, :], axis=1)
    starts = jnp.cumsum(lengths, axis=1) - lengths
    there = lengths > 0
    lengths, starts = (jnp.where(there, one, -1).astype(jnp.int32) for one in (lengths, starts))
    starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
    return Segments(lengths, starts, number[:, -1] < most)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
    """Returns softmax(q kᵀ / sqrt(head_dim)) v, where a token sees those of its own text up to it.

    Args:
      q: [batch, time, heads, head_dim], bf16 or fp16.
      k, v: [batch, time, kv_heads, head_dim].
      segments: the texts; a row without room for all of its texts is NaN.
    """
    # JAX's public attention has no segments, and its names for them may move.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lengths, starts, complete = segments
    attended: Any = cudnn.dot_product_attention(
        q,
        k,
        v,
        None,
        None,
        lengths,
        lengths,
        starts,
        starts,
        scale=q.shape[-1] ** -0.5,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )
    return jnp.where(complete[:, None, None, None], attended, jnp.nan)
