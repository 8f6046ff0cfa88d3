"""Keys and values of the tokens read so far, so that each is computed once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.models.config import DecoderConfig


class Cache(NamedTuple):
    """What a decoder remembers of a batch of rows, each as long as it is.

    A pytree. A row is a slot: setting its length to 0 frees it for another text, whatever the
    others hold, and what lies behind a row's length is never read.
    """

    keys: jax.Array  # [layers, batch, capacity, kv_heads, head_dim], rotated
    values: jax.Array  # as keys
    lengths: jax.Array  # i32[batch]: tokens that each row holds

    @property
    def capacity(self) -> int:
        """Returns how many tokens a row can hold."""
        return self.keys.shape[2]

    def positions(self, count: int, rows: jax.Array | None = None) -> jax.Array:
        """Returns the places i32[rows, count] of the next tokens of each row, or of some."""
        lengths = self.lengths if rows is None else self.lengths.at[rows].get(mode="clip")
        return lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]


def make_cache(config: DecoderConfig, batch: int, capacity: int) -> Cache:
    """Returns an empty cache of `batch` rows of up to `capacity` tokens, in config.dtype."""
    heads = (config.num_key_value_heads, config.head_dim)
    shape = (config.num_hidden_layers, batch, capacity, *heads)
    return Cache(
        jnp.zeros(shape, config.dtype),
        jnp.zeros(shape, config.dtype),
        jnp.zeros((batch,), jnp.int32),
    )


class LayerCache(NamedTuple):
    """One layer's part of a cache, while it reads tokens."""

    keys: jax.Array  # all layers', so that they are written in place
    values: jax.Array
    layer: jax.Array  # i32[]
    positions: jax.Array  # i32[batch, time] of the tokens being read
    rows: jax.Array | None = None  # i32[batch]: the cache's rows that they are of; else all

    def add(self, keys: jax.Array, values: jax.Array) -> "LayerCache":
        """Returns this with keys and values [batch, time, kv_heads, head_dim] at `positions`."""
        rows = jnp.arange(self.positions.shape[0]) if self.rows is None else self.rows
        place = (self.layer, rows[:, None], self.positions)
        return self._replace(
            keys=self.keys.at[place].set(keys, mode="drop"),
            values=self.values.at[place].set(values, mode="drop"),
        )

    def read(self) -> tuple[jax.Array, jax.Array]:
        """Returns the layer's keys and values, [batch, capacity, kv_heads, head_dim]."""
        both = (self.keys, self.values)
        if self.rows is not None:
            keys, values = (one.at[self.layer, self.rows].get(mode="clip") for one in both)
        else:
            keys, values = (
                lax.dynamic_index_in_dim(one, self.layer, keepdims=False) for one in both
            )
        return keys, values

    def mask(self) -> jax.Array:
        """Returns bool[batch, 1, time, capacity]: no token reads what comes after it."""
        places = jnp.arange(self.keys.shape[2])[None, None, None, :]
        return places <= self.positions[:, None, :, None]
