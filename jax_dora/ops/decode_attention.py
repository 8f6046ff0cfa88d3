"""Attention of one new token per row to a KV cache in FP8.

    y = Σ_t p_t V_t      p = softmax_t(q·K_t / sqrt(head_dim))      K = codes∘σ      V = codes∘τ

t are the tokens in the cache and the new one, whose key and value are not rounded. σ and τ have one
number per token and kv head.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.dispatch import choose
from jax_dora.ops.triton import triton_decode_attention


class CodedEntries(NamedTuple):
    """Keys or values of all layers in FP8: codes ∘ scales."""

    codes: jax.Array  # e4m3[layers, batch, kv_heads, capacity, head_dim]
    scales: jax.Array  # f32[layers, batch, kv_heads, capacity]

    def decoded(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns codes ∘ scales."""
        return (self.codes.astype(jnp.float32) * self.scales[..., None]).astype(dtype)


def decode_attention(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    keys: CodedEntries,
    values: CodedEntries,
    lengths: jax.Array,
    layer: int | jax.Array,
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the attention of each row's new token [batch, heads, head_dim], in value's dtype.

    Args:
      q: [batch, heads, head_dim]; computed in fp32.
      key, value: those of the new token, [batch, kv_heads, head_dim]; heads is a multiple of
        kv_heads, and consecutive heads share a key.
      keys, values: the cache of all layers.
      lengths: i32[batch], the number of tokens in each row of the cache.
      layer: the layer of the cache to read.
      window: the number of latest tokens to attend to, with the new one; None for all.
      implementation: "triton" or "xla"; None for the fastest that supports the call.

    Raises:
      NotImplementedError: "triton" is named and does not support the call.
    """
    (_, kv_heads, size), capacity = key.shape, keys.codes.shape[3]
    call = (q.shape[1] // kv_heads, size, capacity, value.dtype)
    kernel = triton_decode_attention
    choice = choose.choose("decode_attention", implementation, (kernel, call))
    q, key = q.astype(jnp.float32), key.astype(jnp.float32)
    if choice is not None:
        layers = jnp.asarray(layer, jnp.int32).reshape(1)
        return choice.launch(q, key, value, *keys, *values, lengths, layers, window=window)
    keys, values = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), (keys, values)
    )
    return _defined(q, key, value, keys, values, lengths, window).astype(value.dtype)


def _defined(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    keys: CodedEntries,
    values: CodedEntries,
    lengths: jax.Array,
    window: int | None,
) -> jax.Array:
    """Returns `decode_attention` in fp32, by its equation, for one layer."""
    (batch, kv_heads, size), capacity = key.shape, keys.codes.shape[2]
    grouped = q.reshape(batch, kv_heads, -1, size) * size**-0.5
    slots = jnp.arange(capacity)[None, None, None]
    ends = lengths[:, None, None, None]
    seen = slots < ends
    if window is not None:
        seen &= slots > ends - window
    dot = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    old = jnp.where(seen, dot("bkgh,bksh->bkgs", grouped, keys.decoded(jnp.float32)), -jnp.inf)
    new = dot("bkgh,bkh->bkg", grouped, key)[..., None]
    p = jax.nn.softmax(jnp.concatenate((old, new), axis=-1), axis=-1)
    y = dot("bkgs,bksh->bkgh", p[..., :-1], values.decoded(jnp.float32))
    y += p[..., -1:] * value.astype(jnp.float32)[:, :, None]
    return y.reshape(q.shape)
