"""A decoder-only transformer for the Llama, Mistral and Qwen families.

Attributes have the names of Hugging Face's modules: the torch path
`model.layers.7.self_attn.q_proj` is `model/layers/self_attn/q_proj` here. All layers are one
module. Its arrays have a leading layer axis, and the forward pass scans over that axis.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_dora.bank import BankArray
from jax_dora.lm.models import activations, rope
from jax_dora.lm.models.attention import Segments, find_segments
from jax_dora.lm.models.cache import Cache, LayerCache
from jax_dora.lm.models.config import DecoderConfig
from jax_dora.lm.models.decoder_layer import INIT, DecoderLayer, MakeLinear, RMSNorm, linear_options
from jax_dora.lm.models.layer_stack import scan, scan_parts, unrolled_scan, unstacked
from jax_dora.ops import is_quantised


class Decoder(nnx.Module):
    """The decoder without its head: embedding, layers and final norm."""

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
        """Returns the hidden states [batch, time, hidden]; see `CausalLM.__call__`."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        mask = None
        count = self.config.segments
        if segment_ids is not None and count and self.config.attention == "cudnn":
            mask = find_segments(segment_ids, count)
        elif segment_ids is not None:
            mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        angles = rope.angles(self.config.rope, self.config.head_dim, positions)
        x = self._run(self.embed_tokens(tokens), angles, mask)
        return self.norm(x)

    def _run(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        mask: jax.Array | Segments | None,
    ) -> jax.Array:
        # A layer only changes its dropout streams, which count their calls. The arrays of an
        # adapter bank are not sliced by layer, since each slice would be a copy.
        graphdef, streams, bank, arrays = nnx.split(self.layers, nnx.RngState, BankArray, ...)

        def one_layer(x, state):
            layer = nnx.merge(graphdef, *state, bank)
            return layer(x, angles, mask)[0], nnx.state(layer, nnx.RngState)

        config = self.config

        def rematerialised(layer, kept):
            # Inside a scan, common-subexpression elimination cannot undo the rematerialisation.
            policy = activations.policy(kept)
            return jax.checkpoint(layer, policy=policy, prevent_cse=config.unroll)

        in_fp8 = getattr(self.layers.mlp.down_proj, "act_qtype", None) is not None
        plan = config, math.ceil(x.shape[0] / config.row_shards), x.shape[1], in_fp8
        if config.unroll:
            if config.remat:
                one_layer = rematerialised(one_layer, activations.plan(*plan))
            layers = unstacked((streams, arrays), config.num_hidden_layers)
            x, streams = unrolled_scan(one_layer, x, layers)
        elif config.remat:
            parts = [
                (count, functools.partial(rematerialised, kept=kept))
                for count, kept in activations.parts(*plan)
            ]
            if config.sharding is not None:
                parts = parts[-1:]  # Others were not measured there.
            x, streams = scan_parts(parts, one_layer, x, (streams, arrays))
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
        """Returns the hidden states [batch, time, hidden] of `tokens`, which follow the tokens in
        `cache`, and the updated cache; see `CausalLM.extend`."""
        positions = cache.positions(tokens.shape[1], rows)
        angles = rope.angles(self.config.rope, self.config.head_dim, positions)
        graphdef, bank, arrays = nnx.split(self.layers, BankArray, ...)
        lengths = positions[:, 0]

        def one_layer(x, layer_and_state):
            number, state = layer_and_state
            options = rows, self.config.sliding_window, self.config.sharding
            layer_cache = LayerCache(cache.keys, cache.values, number, lengths, *options)
            return nnx.merge(graphdef, bank, state)(x, angles, None, layer_cache)

        x, count = self.embed_tokens(tokens), self.config.num_hidden_layers
        if self.config.unroll:
            layers = enumerate(unstacked(arrays, count, inference=True))
            x, added = unrolled_scan(one_layer, x, layers)
        else:
            x, added = scan(one_layer, x, (jnp.arange(count), arrays))
        # The cache is written after all layers have read it. Otherwise XLA would copy the cache.
        x, (keys, values) = lax.optimization_barrier((x, added))
        return self.norm(x), cache.with_tokens(keys, values, positions, counts, rows)


class CausalLM(nnx.Module):
    """A decoder with its head, which computes the logits of the next token.

    Attributes:
      model: the `Decoder`.
      lm_head: an `nnx.Linear`, or None if the head is the transpose of the embedding.
    """

    def __init__(
        self, config: DecoderConfig, *, linear: MakeLinear = nnx.Linear, rngs: nnx.Rngs
    ) -> None:
        """
        Args:
          config: the configuration.
          linear: makes the seven projections of every layer. It is called like `nnx.Linear`.
          rngs: has a `params` stream, which initialises the parameters.
        """
        self.model = Decoder(config, linear, rngs)
        self.lm_head = nnx.data(None)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size, config.vocab_size, **linear_options(config, False, rngs)
            )
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits of the token that follows each token.

        Args:
          tokens: i32[batch, time].
          positions: i32[batch, time]; 0, 1, 2, … by default.
          segment_ids: i32[batch, time], for several texts packed into one row. A token attends only
            to tokens of its own segment.

        Returns:
          Logits [batch, time, vocab] in config.dtype.
        """
        return self.logits(self.model(tokens, positions, segment_ids))

    def extend(
        self,
        tokens: jax.Array,
        cache: Cache,
        counts: jax.Array | None = None,
        rows: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Reads more tokens of each row, which follow the tokens in `cache`.

        Rows can hold different numbers of tokens, and get different numbers of new tokens:

            cache = make_cache(model.config, batch, capacity)
            hidden, cache = model.extend(prompts, cache, lengths_of_prompts)
            hidden, cache = model.extend(next_tokens[:, None], cache)

        Args:
          tokens: i32[batch, time].
          cache: the tokens read so far. Tokens beyond its capacity are dropped.
          counts: i32[batch], the number of new tokens in each row; later tokens of the row are
            padding. A row with count 0 is unchanged. By default, all tokens count.
          rows: i32[batch], the row of the cache that each row of `tokens` belongs to, without
            duplicates. Rows with an index outside of the cache are padding. By default, `tokens`
            has all rows of the cache, in order.

        Returns:
          The hidden states [batch, time, hidden], from which `logits` computes logits, and the
          updated cache.
        """
        return self.model.extend(tokens, cache, counts, rows)

    def next_logits(
        self,
        tokens: jax.Array,
        cache: Cache,
        counts: jax.Array | None = None,
        rows: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Reads more tokens, as `extend`, and returns the logits [batch, vocab] of the token after
        the last new one of each row, and the updated cache. Rows with count 0 get other logits."""
        hidden, cache = self.extend(tokens, cache, counts, rows)
        return self.last_logits(hidden, counts), cache

    def last_logits(self, hidden: jax.Array, counts: jax.Array | None) -> jax.Array:
        """Returns the logits [batch, vocab] of the last of `counts` hidden states of each row."""
        if counts is None or hidden.shape[1] == 1:
            return self.logits(hidden[:, -1])
        last = jnp.maximum(counts - 1, 0)[:, None, None]
        return self.logits(jnp.take_along_axis(hidden, last, axis=1)[:, 0])

    def resize_token_embeddings(self, tokens: int) -> None:
        """Changes the number of tokens, in place. The weights of new tokens are zero."""

        def resize(value: jax.Array, axis: int) -> jax.Array:
            value = lax.slice_in_dim(value, 0, min(tokens, value.shape[axis]), axis=axis)
            added = [(0, tokens - size if n == axis else 0) for n, size in enumerate(value.shape)]
            return jnp.pad(value, added)

        embed, head = self.model.embed_tokens, self.lm_head
        embed.embedding = nnx.Param(resize(embed.embedding[...], 0))
        embed.num_embeddings = tokens
        if head is not None:
            head.kernel = nnx.Param(resize(head.kernel[...], 1))
            head.out_features = tokens
        self.config = self.model.config = dataclasses.replace(self.config, vocab_size=tokens)

    def head(self) -> nnx.Module:
        """Returns the layer that computes logits: `lm_head`, or the embedding."""
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits [..., vocab] of hidden states [..., hidden]."""
        return logits_of(self.head(), hidden)


def logits_of(head: Any, hidden: jax.Array) -> jax.Array:
    """Returns the logits [..., vocab] of hidden states [..., hidden].

    `head` is a linear layer, or an embedding, whose transpose is applied.
    """
    return head.attend(hidden) if isinstance(head, nnx.Embed) else head(hidden)


def for_inference(model: CausalLM) -> tuple[nnx.GraphDef[CausalLM], nnx.State]:
    """Returns the graphdef and state of `model` without dropout. `model` itself is unchanged."""
    model = nnx.merge(*nnx.split(model))
    model.eval()
    return nnx.split(model)


def loop_options(state: nnx.State) -> tuple[tuple[str, bool | int], ...]:
    """Returns `compiler_options` of `jax.jit`, as items, for few tokens in a loop over the layers.

    The options disable XLA's Triton matrix products and the merging of several products. Both copy
    each layer's kernels out of the stacked array, which moves three times the bytes of the kernels.
    cuBLAS reads the kernels in place. Quantised kernels keep Triton, which dequantises them inside
    the product.
    """
    if any(map(is_quantised, jax.tree.leaves(state, is_leaf=is_quantised))):
        return ()
    return ("xla_gpu_enable_triton_gemm", False), ("xla_gpu_dot_merger_threshold_mb", 0)


def step_options(model: nnx.Module) -> tuple[tuple[str, bool | int], ...]:
    """Returns `compiler_options` of `jax.jit`, as items, for an optimizer step of `model`.

    A model may have `step_options` of its own, as an encoder has. Of the others, steps whose
    products are in FP8, forward and backward, have six:

    - These products are cuBLAS's. XLA would find that out by compiling and timing Triton products
      of every shape, which takes most of the time that a step compiles.
    - Only small products of one array are merged, such as those with lora_a: merging those with
      kernels would copy the kernels into one array, and the results out of another.
    - The arrays that a scan keeps for the backward pass are not filled with zeros before it writes
      every element of them.
    - XLA does not rematerialise. What is kept is chosen before, and in a step that uses most of a
      card's memory XLA would compute norms of kernels up to four times and save one hundredth.
    - Collectives start as early as they can, and two may be under way. Otherwise XLA starts the
      gathering of a layer's codes as late as its estimates of times allow.
    """
    own: tuple[tuple[str, bool | int], ...] | None = getattr(model, "step_options", None)
    if own is not None:
        return own
    if any(getattr(module, "bwd_qtype", None) for _, module in nnx.iter_modules(model)):
        return (
            ("xla_gpu_enable_triton_gemm", False),
            ("xla_gpu_dot_merger_threshold_mb", 1),
            ("xla_gpu_enable_dus_accumulator_zero_init_elimination", True),
            ("xla_gpu_memory_limit_slop_factor", 200),
            ("xla_gpu_experimental_collective_start_as_early_as_possible", True),
            ("xla_gpu_experimental_parallel_collective_overlap_limit", 2),
        )
    return ()


def make_model(
    config: DecoderConfig, *, linear: MakeLinear = nnx.Linear, seed: int = 0
) -> CausalLM:
    """Makes a model with random weights on the default device.

    The layers are made one after another under jit. Besides the model itself, this needs memory
    only for the temporaries of one layer. With adapters:

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
