"""A decoder-only transformer of the Llama and Qwen families.

Attributes are named as Hugging Face names its modules, so that a torch path
`model.layers.7.self_attn.q_proj` is `model/layers/self_attn/q_proj` here; all layers are one module
whose arrays have a leading layer axis, and the forward pass scans over it.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jax_dora
from jax_dora.bank.layers import BankArray
from jax_dora.models import activations, rope
from jax_dora.models.cache import Cache, LayerCache
from jax_dora.models.config import DecoderConfig
from jax_dora.ops.projection import RESULT_NAME

# Called like nnx.Linear, which it is unless a model is defined with adapters in it.
MakeLinear = Callable[..., Any]
INIT = nnx.initializers.normal(0.02)


class RMSNorm(nnx.Module):
    """scale ∘ x / sqrt(mean(x²) + epsilon) over the last axis (arXiv 1910.07467)."""

    def __init__(self, features: int, config: DecoderConfig) -> None:
        self.scale = nnx.Param(jnp.ones((features,), config.dtype))
        self.epsilon = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = (wide * lax.rsqrt(mean_square + self.epsilon)).astype(x.dtype)
        return normed * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions."""

    def __init__(self, config: DecoderConfig, linear: MakeLinear, rngs: nnx.Rngs) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = _options(config, config.qkv_bias, rngs)
        self.q_proj = linear(hidden, heads * head_dim, **qkv)
        self.k_proj = linear(hidden, kv_heads * head_dim, **qkv)
        self.v_proj = linear(hidden, kv_heads * head_dim, **qkv)
        self.o_proj = linear(heads * head_dim, hidden, **_options(config, config.o_bias, rngs))
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config)
            self.k_norm = RMSNorm(head_dim, config)
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        mask: jax.Array | None,
        memory: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        config = self.config
        per_head = (*x.shape[:2], -1, config.head_dim)
        q, k, v = (
            _project(layer, x).reshape(per_head)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope.rotate(q, *angles), rope.rotate(k, *angles)
        implementation = config.attention
        if memory is not None:
            memory = memory.add(k, v)
            k, v = memory.read()
            mask = memory.mask()
            implementation = None  # cuDNN is for many queries
        attended = jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=memory is None, implementation=implementation
        )
        return _project(self.o_proj, attended.reshape(*x.shape[:2], -1)), memory


class MLP(nnx.Module):
    """down(silu(gate(x)) ∘ up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, linear: MakeLinear, rngs: nnx.Rngs) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        options = _options(config, config.mlp_bias, rngs)
        self.gate_proj = linear(hidden, intermediate, **options)
        self.up_proj = linear(hidden, intermediate, **options)
        self.down_proj = linear(intermediate, hidden, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        gated = jax_dora.swiglu(self.gate_proj, self.up_proj, x)
        return _project(self.down_proj, checkpoint_name(gated, activations.GATED))


class DecoderLayer(nnx.Module):
    def __init__(self, config: DecoderConfig, linear: MakeLinear, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.self_attn = Attention(config, linear, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.mlp = MLP(config, linear, rngs)

        self.rows = None if config.sharding is None else config.sharding.rows

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        mask: jax.Array | None,
        memory: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        normed = checkpoint_name(self._placed(self.input_layernorm(x)), activations.NORMED)
        attended, memory = self.self_attn(normed, angles, mask, memory)
        x = self._placed(x + attended)
        normed = checkpoint_name(self._placed(self.post_attention_layernorm(x)), activations.NORMED)
        return self._placed(x + self.mlp(normed)), memory

    def _placed(self, x: jax.Array) -> jax.Array:
        # Otherwise XLA may move activations to weights that are in parts, and not the weights.
        return x if self.rows is None else lax.with_sharding_constraint(x, self.rows)


class Decoder(nnx.Module):
    """Embedding, layers and the last norm: everything but the head."""

    def __init__(self, config: DecoderConfig, linear: MakeLinear, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=config.dtype,
            param_dtype=config.dtype,
            embedding_init=INIT,
            rngs=rngs,
        )
        self.layers = _stacked_layers(config, linear, rngs)
        self.norm = RMSNorm(config.hidden_size, config)
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """[batch, time, hidden] of tokens, positions and segments i32[batch, time]."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        mask = None
        if segment_ids is not None:
            mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        angles = rope.angles(self.config.rope, self.config.head_dim, positions)
        x = self._run(self.embed_tokens(tokens), angles, mask)
        return self.norm(x)

    def _run(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], mask: jax.Array | None
    ) -> jax.Array:
        # Dropout streams count their calls; everything else a layer only reads.
        # A bank stays whole: a part of it for each layer would be a copy.
        graphdef, streams, bank, arrays = nnx.split(self.layers, nnx.RngState, BankArray, ...)

        def one_layer(x, state):
            layer = nnx.merge(graphdef, *state, bank)
            return layer(x, angles, mask)[0], nnx.state(layer, nnx.RngState)

        config = self.config
        if config.remat:
            batch = math.ceil(x.shape[0] / config.row_shards)
            kept = activations.policy(activations.plan(config, batch, x.shape[1]))
            # Inside a scan no common subexpressions can undo the rematerialisation.
            one_layer = jax.checkpoint(one_layer, policy=kept, prevent_cse=config.unroll)
        if config.unroll:
            counted = []
            for state in _unstacked((streams, arrays), config.num_hidden_layers):
                x, stream = one_layer(x, state)
                counted.append(stream)
            streams = jax.tree.map(lambda *counts: jnp.stack(counts), *counted)
        else:
            x, streams = lax.scan(one_layer, x, (streams, arrays))
        nnx.update(self.layers, streams)
        return x

    def extend(
        self,
        tokens: jax.Array,
        cache: Cache,
        counts: jax.Array | None = None,
        rows: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Returns [batch, time, hidden] of tokens that follow those in `cache`, and the cache with
        them; see `CausalLM.extend`."""
        positions = cache.positions(tokens.shape[1], rows)
        angles = rope.angles(self.config.rope, self.config.head_dim, positions)
        graphdef, bank, arrays = nnx.split(self.layers, BankArray, ...)

        def one_layer(carry, layer_and_state):
            number, state = layer_and_state
            x, keys, values = carry
            x, memory = nnx.merge(graphdef, bank, state)(
                x, angles, None, LayerCache(keys, values, number, positions, rows)
            )
            assert memory is not None
            return (x, memory.keys, memory.values), None

        carry = self.embed_tokens(tokens), cache.keys, cache.values
        numbers = jnp.arange(self.config.num_hidden_layers)
        (x, keys, values), _ = lax.scan(one_layer, carry, (numbers, arrays))
        added = tokens.shape[1] if counts is None else counts
        if rows is None:
            lengths = cache.lengths + added
        else:
            lengths = cache.lengths.at[rows].add(added, mode="drop")
        return self.norm(x), Cache(keys, values, lengths)


class CausalLM(nnx.Module):
    """The decoder and its head.

    Attributes:
      model: the `Decoder`.
      lm_head: an `nnx.Linear`, or None where the head is the embedding's transpose.
    """

    def __init__(
        self, config: DecoderConfig, *, linear: MakeLinear = nnx.Linear, rngs: nnx.Rngs
    ) -> None:
        """
        Args:
          config: sizes and switches.
          linear: makes the seven projections of every layer; called like `nnx.Linear`.
          rngs: its `params` stream makes parameters.
        """
        self.model = Decoder(config, linear, rngs)
        self.lm_head = nnx.data(None)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size, config.vocab_size, **_options(config, False, rngs)
            )
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token, for every token.

        Args:
          tokens: i32[batch, time].
          positions: i32[batch, time]; 0, 1, 2, … if not given.
          segment_ids: i32[batch, time], for several texts packed in one row: a token attends to
            tokens of its own segment only.

        Returns:
          [batch, time, vocab] in config.dtype.
        """
        return self.logits(self.model(tokens, positions, segment_ids))

    def extend(
        self,
        tokens: jax.Array,
        cache: Cache,
        counts: jax.Array | None = None,
        rows: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Reads more tokens of each row, after those that `cache` holds.

        Rows may hold different numbers of tokens, and be given different numbers:

            cache = make_cache(model.config, batch, capacity)
            hidden, cache = model.extend(prompts, cache, lengths_of_prompts)
            hidden, cache = model.extend(next_tokens[:, None], cache)

        Args:
          tokens: i32[batch, time].
          cache: the rows so far; what does not fit into its capacity is forgotten.
          counts: i32[batch]: so many of the first tokens of each row are its own, and the others
            padding; all of them if not given. A row of 0 stays as it is.
          rows: i32[batch], different: the rows of the cache that `tokens` are of, where it has
            more; one that it does not have is padding, and read nowhere. All of them if not given.

        Returns:
          [batch, time, hidden], which `logits` takes; and the cache with the tokens in it.
        """
        return self.model.extend(tokens, cache, counts, rows)

    def head(self) -> nnx.Module:
        """Returns the layer that `logits_of` makes logits with."""
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The head: [..., hidden] to [..., vocab]."""
        return logits_of(self.head(), hidden)


def logits_of(head: Any, hidden: jax.Array) -> jax.Array:
    """Returns the logits [..., vocab] of hidden [..., hidden]; an embedding's transpose is a head
    too."""
    return head.attend(hidden) if isinstance(head, nnx.Embed) else head(hidden)


def make_model(
    config: DecoderConfig, *, linear: MakeLinear = nnx.Linear, seed: int = 0
) -> CausalLM:
    """A model of random weights, made on the device under jit, layer by layer.

    Besides the model itself, one layer's temporaries are all that it takes. With adapters:

        make_model(config, linear=functools.partial(jax_dora.DoRALinear, rank=384, alpha=192))
    """

    @nnx.jit
    def make() -> CausalLM:
        return CausalLM(config, linear=linear, rngs=nnx.Rngs(seed))

    return make()


def _stacked_layers(config: DecoderConfig, linear: MakeLinear, rngs: nnx.Rngs) -> DecoderLayer:
    def make(key: jax.Array) -> DecoderLayer:
        return DecoderLayer(config, linear, nnx.Rngs(key))

    keys = jax.random.split(rngs.params(), config.num_hidden_layers)
    graphdef = nnx.graphdef(nnx.eval_shape(make, keys[0]))
    return nnx.merge(graphdef, lax.map(lambda key: nnx.state(make(key)), keys))


def _project(layer: Any, x: jax.Array) -> jax.Array:
    """Returns layer(x), which carries `RESULT_NAME`; a DoRA layer gives that name itself."""
    result = layer(x)
    return result if isinstance(layer, jax_dora.DoRALayer) else checkpoint_name(result, RESULT_NAME)


def _unstacked(tree: Any, count: int) -> list[Any]:
    """Returns the layers of a stack. Their gradients are put together again by one copy."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [[part[0] for part in lax.split(leaf, [1] * count)] for leaf in leaves]
    return [structure.unflatten(layer) for layer in zip(*parts, strict=True)]


def _options(config: DecoderConfig, use_bias: bool, rngs: nnx.Rngs) -> dict[str, Any]:
    return {
        "use_bias": use_bias,
        "dtype": config.dtype,
        "param_dtype": config.dtype,
        "kernel_init": INIT,
        "rngs": rngs,
    }
