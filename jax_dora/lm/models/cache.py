"""The KV cache: keys and values of the tokens read so far."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dora.lm.models import kv_codes
from jax_dora.lm.models.attention import attend
from jax_dora.lm.models.config import DecoderConfig
from jax_dora.lm.models.sharding import DecoderSharding
from jax_dora.ops import CodedEntries, decode_attention


class Cache(NamedTuple):
    """The keys and values of the tokens that a decoder has read. Rows can differ in length.

    A cache is a pytree. Each row is a slot: setting its length to 0 frees it for another text and
    does not affect other rows. Entries beyond a row's length are never read. In FP8, keys have been
    transformed as in `kv_codes`.
    """

    keys: jax.Array | CodedEntries  # [layers, batch, kv_heads, capacity, head_dim], rotated
    values: jax.Array | CodedEntries  # the same shape as keys
    lengths: jax.Array  # i32[batch]: number of tokens in each row

    @property
    def capacity(self) -> int:
        """The most tokens that a row can hold."""
        return jax.tree.leaves(self.keys)[0].shape[3]

    def positions(self, count: int, rows: jax.Array | None = None) -> jax.Array:
        """Returns the positions i32[rows, count] of the next `count` tokens of the given rows, or
        of all rows."""
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
        """Returns the cache with keys and values written at `positions`.

        Args:
          keys, values: [layers, batch, time, kv_heads, head_dim].
          positions: i32[batch, time].
          counts, rows: the same as in `CausalLM.extend`.
        """
        added = positions.shape[1] if counts is None else counts
        if rows is None:
            lengths = self.lengths + added
            rows = jnp.arange(positions.shape[0])
        else:
            lengths = self.lengths.at[rows].add(added, mode="drop")
        index = (slice(None), rows[:, None], slice(None), positions)
        new: Any = keys, values
        if isinstance(self.keys, CodedEntries):
            new = kv_codes.coded(kv_codes.transformed(keys)), kv_codes.coded(values)

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[index].set(jnp.moveaxis(new, 0, 2), mode="drop")

        new_keys, new_values = jax.tree.map(write, (self.keys, self.values), new)
        return Cache(new_keys, new_values, lengths)

    def wiped(self, row: jax.Array) -> "Cache":
        """Returns the cache with the keys and values of a row set to zero."""
        keys, values = jax.tree.map(lambda x: x.at[:, row].set(0), (self.keys, self.values))
        return self._replace(keys=keys, values=values)


def make_cache(
    config: DecoderConfig, batch: int, capacity: int, kv_cache: str | None = None
) -> Cache:
    """Returns an empty cache of `batch` rows of at least `capacity` tokens.

    Args:
      kv_cache: the format of keys and values: None for config.dtype, or "float8_e4m3fn".

    Raises:
      ValueError: `kv_cache` is another format.
    """
    kv_codes.check_format(kv_cache)
    if kv_cache is not None:
        capacity = math.ceil(capacity / kv_codes.BLOCK) * kv_codes.BLOCK
    heads = config.num_key_value_heads
    shape = (config.num_hidden_layers, batch, heads, capacity, config.head_dim)

    def empty() -> Any:
        if kv_cache is None:
            return jnp.zeros(shape, config.dtype)
        return CodedEntries(jnp.zeros(shape, kv_cache), jnp.zeros(shape[:-1], jnp.float32))

    return Cache(empty(), empty(), jnp.zeros((batch,), jnp.int32))


class LayerCache(NamedTuple):
    """One layer's view of a cache while its rows read more tokens.

    A layer only reads the cache: the decoder writes the new keys and values once all layers are
    done. XLA reads a layer of an argument in place. It would copy a layer of an array that the
    program has just written.
    """

    keys: jax.Array | CodedEntries  # of all layers, as in Cache
    values: jax.Array | CodedEntries
    layer: int | jax.Array
    lengths: jax.Array  # i32[batch]: number of tokens in each row
    rows: jax.Array | None = None  # i32[batch]: the rows of the cache to read; None for all
    window: int | None = None  # the number of latest tokens to attend to; None for all
    sharding: DecoderSharding | None = None  # of a cache on several devices

    def attend(self, q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Returns the causal attention of new tokens to the cached tokens and to each other.

        Args:
          q: [batch, time, heads, head_dim], rotated.
          keys, values: those of the new tokens, [batch, time, kv_heads, head_dim].

        Returns:
          An array of q's shape and dtype.
        """
        time = q.shape[1]
        if isinstance(self.keys, CodedEntries):
            q, keys = kv_codes.transformed(q), kv_codes.transformed(keys)
            if time == 1 and self.rows is None:
                return self._decode(q, keys, values)
            q, keys = q.astype(values.dtype), keys.astype(values.dtype)
        old_keys, old_values = (self._read(x, values.dtype) for x in (self.keys, self.values))
        if time == 1:
            new = keys[:, 0, :, None], values[:, 0, :, None]
            return self._attend_one_token(q, *new, old_keys, old_values)
        positions = self.lengths[:, None] + jnp.arange(time, dtype=jnp.int32)[None]
        index = (jnp.arange(q.shape[0])[:, None], slice(None), positions)
        keys, values = (
            jnp.swapaxes(old.at[index].set(new, mode="drop"), 1, 2)
            for old, new in ((old_keys, keys), (old_values, values))
        )
        cached_positions = jnp.arange(keys.shape[1])[None, None, None]
        return attend(
            q, keys, values, mask=self._seen(cached_positions, positions[:, None, :, None])
        )

    def _decode(self, q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Returns the attention of one new token per row to a cache in FP8."""
        decode: Any = functools.partial(decode_attention, window=self.window)
        if self.sharding is not None:  # each device has the cache of its heads
            axis, cached = P(None, "tp"), P(None, None, "tp")
            specs = axis, axis, axis, cached, cached, P(), P()
            decode = jax.shard_map(
                decode, mesh=self.sharding.mesh, in_specs=specs, out_specs=axis, check_vma=False
            )
        new = (x[:, 0] for x in (q, keys, values))
        attended = decode(*new, self.keys, self.values, self.lengths, jnp.asarray(self.layer))
        return attended[:, None]

    def _attend_one_token(
        self, q: jax.Array, key: jax.Array, value: jax.Array, keys: jax.Array, values: jax.Array
    ) -> jax.Array:
        """Returns the attention of one new token per row, without writing it into the cache.

        `key` and `value` are [batch, kv_heads, 1, head_dim]. They replace the entries of `keys` and
        `values` at the new token's position.
        """
        (batch, kv_heads, _, size), capacity = key.shape, keys.shape[2]
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        grouped_q = q.reshape(batch, kv_heads, -1, size)
        positions = jnp.arange(capacity, dtype=jnp.int32)[None, None, None]
        lengths = self.lengths[:, None, None, None]
        is_new = positions == lengths
        logits = jnp.where(
            is_new, dot("bkgh,bkoh->bkgo", grouped_q, key), dot("bkgh,bksh->bkgs", grouped_q, keys)
        )
        logits = jnp.where(self._seen(positions, lengths), logits * size**-0.5, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype)
        new = weights.at[jnp.arange(batch), :, :, self.lengths].get(mode="fill", fill_value=0)
        attended = dot("bkgs,bksh->bkgh", jnp.where(is_new, 0, weights), values)
        attended = attended + new[..., None].astype(jnp.float32) * value.astype(jnp.float32)
        return attended.astype(q.dtype).reshape(q.shape)

    def _seen(self, cached: jax.Array, new: jax.Array) -> jax.Array:
        """Returns whether tokens at positions `new` attend to those at positions `cached`."""
        seen = cached <= new
        return seen if self.window is None else seen & (cached > new - self.window)

    def _read(self, stack: jax.Array | CodedEntries, dtype: Any) -> jax.Array:
        """Returns this layer's entries of the rows, [batch, kv_heads, capacity, head_dim]."""

        def read(array: jax.Array) -> jax.Array:
            if self.rows is None:
                return lax.dynamic_index_in_dim(array, self.layer, keepdims=False)
            return array.at[self.layer, self.rows].get(mode="clip")

        entries = jax.tree.map(read, stack)
        return entries.decoded(dtype) if isinstance(entries, CodedEntries) else entries
