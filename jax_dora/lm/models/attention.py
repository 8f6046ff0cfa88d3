"""Attention of the decoder: with a mask, and within the texts of packed rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dora.ops.dispatch import choose

# cuDNN's backward pass runs over the rows once for every possible text. With more texts than this,
# attention with a mask is as fast (H100, 2 rows of 4096 tokens, 32 heads).
MAX_SEGMENTS = 64


class Segments(NamedTuple):
    """The texts that each row of a batch holds one after the other.

    Rows with fewer than `count` texts are padded with -1.

    Attributes:
      lengths: i32[batch, count], in tokens.
      starts: i32[batch, count + 1]; the last entry is always -1.
      complete: bool[batch], whether the row has at most `count` texts.
    """

    lengths: jax.Array
    starts: jax.Array
    complete: jax.Array


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None = None, **options: Any
) -> jax.Array:
    """Returns `jax.nn.dot_product_attention`, over the latest `window` tokens if it is given.

    On CPU, float16 inputs are computed in float32, since XLA has no float16 product with a float32
    result there (jax 0.12).
    """
    is_wide = q.dtype == jnp.float16 and choose.target().platform == "cpu"
    if window is not None:
        options["local_window_size"] = (window - 1, 0)
    wide = [x.astype(jnp.float32) if is_wide else x for x in (q, k, v)]
    return jax.nn.dot_product_attention(*wide, **options).astype(q.dtype)


def find_segments(segment_ids: jax.Array, count: int) -> Segments:
    """Returns the first `count` texts of every row.

    A new text begins wherever `segment_ids` i32[batch, time] changes.
    """
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    number = jnp.pad(jnp.cumsum(changed, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    lengths = jnp.sum(number[:, :, None] == jnp.arange(count)[None, None, :], axis=1)
    starts = jnp.cumsum(lengths, axis=1) - lengths
    exists = lengths > 0
    lengths, starts = (jnp.where(exists, x, -1).astype(jnp.int32) for x in (lengths, starts))
    starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
    return Segments(lengths, starts, number[:, -1] < count)


def attend_segments(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
    """Returns causal attention within each text, computed by cuDNN.

    A mask [batch, 1, time, time] would make attention compute the whole square of a row. cuDNN
    reads where each text begins and how long it is, and computes the square of each text only.

    Args:
      q: [batch, time, heads, head_dim], bf16 or fp16.
      k, v: [batch, time, kv_heads, head_dim].
      segments: the texts. The result is NaN in rows that are not `complete`.
    """
    # JAX's public attention does not accept segments. This module is private and may move.
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
