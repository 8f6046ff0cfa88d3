"""Keys and values of the tokens read so far, so that each is computed once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.models.attention import attend
from jax_dora.models.config import DecoderConfig


class Cache(NamedTuple):
    """The keys and values of the tokens that a decoder has read, in rows of different lengths.

    A pytree. A row is a slot: setting its length to 0 frees it for another text, whatever the
    others hold, and what lies behind a row's length is never read.
    """

    keys: jax.Array  # [layers, batch, kv_heads, capacity, head_dim], rotated
    values: jax.Array  # as keys
    lengths: jax.Array  # i32[batch]: tokens that each row holds

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def positions(self, count: int, rows: jax.Array | None = None) -> jax.Array:
        """Returns the places i32[rows, count] of the next tokens of each row, or of some."""
        lengths = self.lengths if rows is None else self.lengths.at[rows].get(mode="clip")
        return lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]

    def with_tokens(
        self,
        keys: jax.Array,
        values: jax.Array,
        positions: jax.Array,
        counts: jax.Array | None,
        rows: jax.Array | None,
    ) -> "Cache":
        """Returns the cache with keys and values [layers, batch, time, kv_heads, head_dim] at
        `positions`, of which each row counts the first `counts`; see `CausalLM.extend`."""
        added = positions.shape[1] if counts is None else counts
        if rows is None:
            lengths = self.lengths + added
            rows = jnp.arange(positions.shape[0])
        else:
            lengths = self.lengths.at[rows].add(added, mode="drop")
        place = (slice(None), rows[:, None], slice(None), positions)

        def written(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[place].set(jnp.moveaxis(new, 0, 2), mode="drop")

        return Cache(written(self.keys, keys), written(self.values, values), lengths)


def make_cache(config: DecoderConfig, batch: int, capacity: int) -> Cache:
    """Returns an empty cache of `batch` rows of up to `capacity` tokens, in config.dtype."""
    heads = config.num_key_value_heads
    shape = (config.num_hidden_layers, batch, heads, capacity, config.head_dim)
    return Cache(
        jnp.zeros(shape, config.dtype),
        jnp.zeros(shape, config.dtype),
        jnp.zeros((batch,), jnp.int32),
    )


class LayerCache(NamedTuple):
    """One layer's part of a cache, while its rows read more tokens.

    It is only read: what has just been written is no argument of the program, of which XLA's
    products read a layer where it lies, and they would read a copy.
    """

    keys: jax.Array  # all layers'
    values: jax.Array
    layer: int | jax.Array
    lengths: jax.Array  # i32[batch]: tokens that each row holds
    rows: jax.Array | None = None  # i32[batch]: the cache's rows that these are; else all

    def attend(self, q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Returns the attention of new tokens to those in the cache and to one another.

        Args:
          q: [batch, time, heads, head_dim], rotated.
          keys, values: the new tokens' own, [batch, time, kv_heads, head_dim].

        Returns:
          As q. No token reads what comes after it.
        """
        old_keys, old_values = self._read(self.keys), self._read(self.values)
        time = q.shape[1]
        if time == 1:
            own = keys[:, 0, :, None], values[:, 0, :, None]
            return self._attend_once(q, *own, old_keys, old_values)
        positions = self.lengths[:, None] + jnp.arange(time, dtype=jnp.int32)[None]
        place = (jnp.arange(q.shape[0])[:, None], slice(None), positions)
        keys, values = (
            jnp.swapaxes(old.at[place].set(new, mode="drop"), 1, 2)
            for old, new in ((old_keys, keys), (old_values, values))
        )
        places = jnp.arange(keys.shape[1])[None, None, None]
        return attend(q, keys, values, mask=places <= positions[:, None, :, None])

    def _attend_once(
        self, q: jax.Array, key: jax.Array, value: jax.Array, keys: jax.Array, values: jax.Array
    ) -> jax.Array:
        """Returns the attention of one token a row, of key and value [batch, kv_heads, 1,
        head_dim], which stand for what the cache has in their place."""
        (batch, kv_heads, _, size), capacity = key.shape, keys.shape[2]
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        of_head = q.reshape(batch, kv_heads, -1, size)
        places = jnp.arange(capacity, dtype=jnp.int32)[None, None, None]
        lengths = self.lengths[:, None, None, None]
        is_own = places == lengths
        logits = jnp.where(
            is_own, dot("bkgh,bkoh->bkgo", of_head, key), dot("bkgh,bksh->bkgs", of_head, keys)
        )
        logits = jnp.where(places <= lengths, logits * size**-0.5, -jnp.inf)
        shares = jax.nn.softmax(logits, axis=-1).astype(values.dtype)
        own = shares.at[jnp.arange(batch), :, :, self.lengths].get(mode="fill", fill_value=0)
        attended = dot("bkgs,bksh->bkgh", jnp.where(is_own, 0, shares), values)
        attended = attended + own[..., None].astype(jnp.float32) * value.astype(jnp.float32)
        return attended.astype(q.dtype).reshape(q.shape)

    def _read(self, stack: jax.Array) -> jax.Array:
        """Returns the layer's part for the rows, [batch, kv_heads, capacity, head_dim]."""
        if self.rows is None:
            return lax.dynamic_index_in_dim(stack, self.layer, keepdims=False)
        return stack.at[self.layer, self.rows].get(mode="clip")
