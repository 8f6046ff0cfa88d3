"""A decoder-only transformer of the Llama and Qwen families.

Attributes are named as Hugging Face names its modules, so that a torch path
`model.layers.7.self_attn.q_proj` is `model/layers/self_attn/q_proj` here; all layers are one module
whose arrays have a leading layer axis, and the forward pass scans over it.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_dora.bank.layers import BankArray
from jax_dora.models import activations, rope, segments
from jax_dora.models.cache import Cache, LayerCache
from jax_dora.models.config import DecoderConfig
from jax_dora.models.layer import INIT, DecoderLayer, MakeLinear, RMSNorm, linear_options
from jax_dora.ops.quantised import is_quantised


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
        """Returns [batch, time, hidden] of tokens, positions and segments i32[batch, time]."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        mask = None
        most = self.config.segments
        if segment_ids is not None and most and self.config.attention == "cudnn":
            mask = segments.segments_of(segment_ids, most)
        elif segment_ids is not None:
            mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        angles = rope.angles(self.config.rope, self.config.head_dim, positions)
        x = self._run(self.embed_tokens(tokens), angles, mask)
        return self.norm(x)

    def _run(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        mask: jax.Array | segments.Segments | None,
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
            layers = unstacked((streams, arrays), config.num_hidden_layers)
            x, streams = _one_after_the_other(one_layer, x, layers)
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

        lengths = positions[:, 0]

        def one_layer(x, layer_and_state):
            number, state = layer_and_state
            memory = LayerCache(cache.keys, cache.values, number, lengths, rows)
            return nnx.merge(graphdef, bank, state)(x, angles, None, memory)

        x, count = self.embed_tokens(tokens), self.config.num_hidden_layers
        if self.config.unroll:
            layers = enumerate(unstacked(arrays, count))
            x, added = _one_after_the_other(one_layer, x, layers)
        else:
            x, added = lax.scan(one_layer, x, (jnp.arange(count), arrays))
        # Written when all layers have read, or XLA writes into a copy.
        x, (keys, values) = lax.optimization_barrier((x, added))
        return self.norm(x), cache.with_tokens(keys, values, positions, counts, rows)


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
                config.hidden_size, config.vocab_size, **linear_options(config, False, rngs)
            )
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits of the next token, for every token.

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
        """Applies the head: [..., hidden] to [..., vocab]."""
        return logits_of(self.head(), hidden)


def logits_of(head: Any, hidden: jax.Array) -> jax.Array:
    """Returns the logits [..., vocab] of hidden [..., hidden]; an embedding's transpose is a head
    too."""
    return head.attend(hidden) if isinstance(head, nnx.Embed) else head(hidden)


def for_inference(model: CausalLM) -> tuple[nnx.GraphDef[CausalLM], nnx.State]:
    """Returns a model without dropout, taken apart; `model` itself stays as it is."""
    model = nnx.merge(*nnx.split(model))
    model.eval()
    return nnx.split(model)


def loop_options(state: nnx.State) -> tuple[tuple[str, bool | int], ...]:
    """Returns items of `jax.jit`'s `compiler_options` for few tokens in a loop over the layers.

    XLA's Triton products, and one product of several kernels, have every layer's kernels copied out
    of their stack first, which moves three times their bytes; cuBLAS reads a kernel where it lies.
    Codes are left to Triton, which makes numbers of them on the way.
    """
    if any(map(is_quantised, jax.tree.leaves(state, is_leaf=is_quantised))):
        return ()
    return ("xla_gpu_enable_triton_gemm", False), ("xla_gpu_dot_merger_threshold_mb", 0)


def make_model(
    config: DecoderConfig, *, linear: MakeLinear = nnx.Linear, seed: int = 0
) -> CausalLM:
    """Makes a model of random weights on the device under jit, layer by layer.

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


def _one_after_the_other(function: Any, x: jax.Array, layers: Iterable[Any]) -> tuple[Any, Any]:
    """Does as `lax.scan`, without a loop."""
    results = []
    for layer in layers:
        x, result = function(x, layer)
        results.append(result)
    return x, jax.tree.map(lambda *each: jnp.stack(each), *results)


def unstacked(tree: Any, count: int) -> list[Any]:
    """Returns the layers of a stack. Their gradients are put together again by one copy."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [[part[0] for part in lax.split(leaf, [1] * count)] for leaf in leaves]
    return [structure.unflatten(layer) for layer in zip(*parts, strict=True)]
