"""DeBERTa-v2 and v3 (arXiv 2006.03654, 2111.09543) with a head that classifies texts.

Attributes have the names of Hugging Face's modules: the torch path
`deberta.encoder.layer.7.attention.self.query_proj` is `deberta/encoder/layer/7/attention/self/
query_proj` here, and a PEFT folder needs no translation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_dora
from jax_dora import ops
from jax_dora.lm.encoder.encoder_config import DebertaConfig
from jax_dora.lm.encoder.relative_positions import buckets_of

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
# An odd number, so that no two dropouts of a call share a seed.
NEXT_SEED = 0x9E3779B9


class Dropouts:
    """The dropouts of one call, each with a seed that follows from the call's.

    As `StableDropout` of the original, they keep an element with the probability 1 - rate and
    divide it by that. Masks are computed where they are used, in both passes, and not stored.
    """

    def __init__(self, seed: jax.Array | None) -> None:
        self.seed, self.count = seed, 0

    def next(self, rate: float) -> ops.Dropout | None:
        """Returns the next dropout, or None if nothing is dropped."""
        if self.seed is None or not rate:
            return None
        self.count += 1
        return ops.Dropout(self.seed + np.uint32(self.count * NEXT_SEED % 2**32), rate)

    def __call__(self, x: jax.Array, rate: float) -> jax.Array:
        """Returns x after the next dropout."""
        dropout = self.next(rate)
        return x if dropout is None else ops.drop(x, dropout.seed, dropout.rate)


def _linear(inputs: int, outputs: int, config: DebertaConfig, rngs: nnx.Rngs, **options: Any):
    kernel_init = nnx.initializers.normal(config.initializer_range)
    return nnx.Linear(
        inputs, outputs, kernel_init=kernel_init, **_dtypes(config), rngs=rngs, **options
    )


def _embed(rows: int, features: int, config: DebertaConfig, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(config.initializer_range)
    return nnx.Embed(rows, features, embedding_init=init, **_dtypes(config), rngs=rngs)


def _layer_norm(config: DebertaConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.hidden_size, epsilon=config.layer_norm_eps, **_dtypes(config), rngs=rngs
    )


def _dtypes(config: DebertaConfig) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype or config.dtype}


class Embeddings(nnx.Module):
    """The sum of the embeddings of words and, if there are any, of positions and of types."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        size = config.embedding_size
        self.word_embeddings = _embed(config.vocab_size, size, config, rngs)
        if config.position_biased_input:
            rows = config.max_position_embeddings
            self.position_embeddings = _embed(rows, size, config, rngs)
        if config.type_vocab_size > 0:
            self.token_type_embeddings = _embed(config.type_vocab_size, size, config, rngs)
        if size != config.hidden_size:
            self.embed_proj = _linear(size, config.hidden_size, config, rngs, use_bias=False)
        self.LayerNorm = _layer_norm(config, rngs)
        self.config = config

    def __call__(
        self, tokens: jax.Array, mask: jax.Array, types: jax.Array | None, dropouts: Dropouts
    ) -> jax.Array:
        config = self.config
        x = self.word_embeddings(tokens)
        if config.position_biased_input:
            x = x + self.position_embeddings(jnp.arange(tokens.shape[1]))[None]
        if config.type_vocab_size > 0:
            # By a product: of a lookup, the gradients of all tokens would be added to few rows.
            one_hot = jax.nn.one_hot(
                jnp.zeros_like(tokens) if types is None else types,
                config.type_vocab_size,
                dtype=x.dtype,
            )
            x = x + one_hot @ self.token_type_embeddings.embedding[...].astype(x.dtype)
        if config.embedding_size != config.hidden_size:
            x = self.embed_proj(x)
        x = jnp.where(mask[..., None], self.LayerNorm(x), 0)
        return dropouts(x, config.hidden_dropout_prob)


class SelfAttention(nnx.Module):
    """Disentangled self-attention, or without relative positions BERT's."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        features = config.num_attention_heads * config.attention_head_size
        linear = functools.partial(_linear, config.hidden_size, features, config, rngs)
        self.query_proj, self.key_proj, self.value_proj = linear(), linear(), linear()
        self.terms = config.pos_att_type if config.relative_attention else ()
        if self.terms and not config.share_att_key:
            if "c2p" in self.terms:
                self.pos_key_proj = linear()
            if "p2c" in self.terms:
                self.pos_query_proj = linear()
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array,
        positions: jax.Array | None,
        buckets: np.ndarray,
        dropouts: Dropouts,
    ) -> jax.Array:
        config = self.config

        def heads(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:-1], config.num_attention_heads, -1)

        layers = self.query_proj, self.key_proj, self.value_proj
        q, k, v = map(heads, jax_dora.apply_layers(layers, x))
        pos_key = pos_query = None
        if positions is not None:
            positions = dropouts(positions, config.hidden_dropout_prob)
            to_key = self.key_proj if config.share_att_key else getattr(self, "pos_key_proj", None)
            to_query = (
                self.query_proj if config.share_att_key else getattr(self, "pos_query_proj", None)
            )
            if to_key is not None and "c2p" in self.terms:
                pos_key = heads(to_key(positions))
            if to_query is not None and "p2c" in self.terms:
                pos_query = heads(to_query(positions))
        dropout = dropouts.next(config.attention_probs_dropout_prob)
        options: Any = {"dropout": dropout, "implementation": config.attention}
        attended = ops.disentangled_attention(
            q, k, v, pos_key, pos_query, buckets, mask=mask, **options
        )
        return attended.reshape(*x.shape[:-1], -1)


class Output(nnx.Module):
    """Computes norm(dropout(dense(y)) + x)."""

    def __init__(self, inputs: int, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        self.dense = _linear(inputs, config.hidden_size, config, rngs)
        self.LayerNorm = _layer_norm(config, rngs)
        self.rate = config.hidden_dropout_prob

    def __call__(self, y: jax.Array, x: jax.Array, dropouts: Dropouts) -> jax.Array:
        return self.LayerNorm(dropouts(self.dense(y), self.rate) + x)


class Attention(nnx.Module):
    """Self-attention and its output."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        self.self = SelfAttention(config, rngs)
        features = config.num_attention_heads * config.attention_head_size
        self.output = Output(features, config, rngs)


class Intermediate(nnx.Module):
    """Computes act(dense(x))."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        self.dense = _linear(config.hidden_size, config.intermediate_size, config, rngs)
        self.act = config.hidden_act

    def __call__(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.act](self.dense(x))


class Layer(nnx.Module):
    """One layer of the encoder: attention and an MLP, each followed by a norm."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        self.attention = Attention(config, rngs)
        self.intermediate = Intermediate(config, rngs)
        self.output = Output(config.intermediate_size, config, rngs)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array,
        positions: jax.Array | None,
        buckets: np.ndarray,
        dropouts: Dropouts,
    ) -> jax.Array:
        attended = self.attention.self(x, mask, positions, buckets, dropouts)
        x = self.attention.output(attended, x, dropouts)
        return self.output(self.intermediate(x), x, dropouts)


class Convolution(nnx.Module):
    """Adds a convolution of the embeddings to the first layer's result (DeBERTa-v2 xlarge)."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        size, width = config.hidden_size, config.conv_kernel_size
        self.conv = nnx.Conv(
            size,
            size,
            (width,),
            padding=((width - 1) // 2,),
            feature_group_count=config.conv_groups,
            **_dtypes(config),
            rngs=rngs,
        )
        self.LayerNorm = _layer_norm(config, rngs)
        self.config = config

    def __call__(
        self, embedded: jax.Array, x: jax.Array, mask: jax.Array, dropouts: Dropouts
    ) -> jax.Array:
        config = self.config
        y = jnp.where(mask[..., None], self.conv(embedded), 0)
        y = ACTIVATIONS[config.conv_act](dropouts(y, config.hidden_dropout_prob))
        return jnp.where(mask[..., None], self.LayerNorm(x + y), 0)


class Encoder(nnx.Module):
    """The layers, and the embedding of relative positions that they share."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        self.layer = nnx.List([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        if config.relative_attention:
            self.rel_embeddings = _embed(2 * config.span, config.hidden_size, config, rngs)
        if config.norm_rel_ebd:
            self.LayerNorm = _layer_norm(config, rngs)
        if config.conv_kernel_size > 0:
            self.conv = Convolution(config, rngs)
        self.config = config

    def __call__(self, x: jax.Array, mask: jax.Array, dropouts: Dropouts) -> jax.Array:
        config, embedded, positions = self.config, x, None
        if config.relative_attention:
            positions = self.rel_embeddings(jnp.arange(2 * config.span))
            positions = self.LayerNorm(positions) if config.norm_rel_ebd else positions
        buckets = buckets_of(config, x.shape[1])
        for number, layer in enumerate(self.layer):
            x = layer(x, mask, positions, buckets, dropouts)
            if number == 0 and config.conv_kernel_size > 0:
                x = self.conv(embedded, x, mask, dropouts)
        return x


class Deberta(nnx.Module):
    """The encoder with its embeddings."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        self.embeddings = Embeddings(config, rngs)
        self.encoder = Encoder(config, rngs)

    def __call__(
        self, tokens: jax.Array, mask: jax.Array, types: jax.Array | None, dropouts: Dropouts
    ) -> jax.Array:
        """Returns the hidden states [batch, time, hidden]. Those of padding are of no use."""
        return self.encoder(self.embeddings(tokens, mask, types, dropouts), mask, dropouts)


class Pooler(nnx.Module):
    """Computes act(dense(dropout(x))) of the first token."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        self.dense = _linear(config.pooler_hidden_size, config.pooler_hidden_size, config, rngs)
        self.config = config

    def __call__(self, x: jax.Array, dropouts: Dropouts) -> jax.Array:
        x = dropouts(x[:, 0], self.config.pooler_dropout)
        return ACTIVATIONS[self.config.pooler_hidden_act](self.dense(x))


class SequenceClassifier(nnx.Module):
    """A DeBERTa encoder with a pooler of the first token and a classifier.

    `model.train()` turns its dropouts on, and `model.eval()` off, as it is at first.
    """

    def __init__(self, config: DebertaConfig, *, rngs: nnx.Rngs) -> None:
        self.deberta = Deberta(config, rngs)
        self.config = config
        self.make_head(rngs)

    def make_head(self, rngs: nnx.Rngs) -> None:
        """Replaces the pooler and the classifier by new ones of random weights."""
        config = self.config
        self.pooler = Pooler(config, rngs)
        rate = config.cls_dropout
        rate = config.hidden_dropout_prob if rate is None else rate
        self.dropout = nnx.Dropout(rate, deterministic=True, rngs=rngs)
        self.classifier = _linear(config.pooler_hidden_size, config.num_labels, config, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        types: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits [batch, num_labels], in the config's dtype.

        Args:
          tokens: i32[batch, time].
          mask: bool[batch, time], which tokens are no padding; all by default.
          types: i32[batch, time], the types of the tokens, if the model knows any; 0 by default.
        """
        mask = jnp.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
        stream: Any = self.dropout.rngs
        dropouts = Dropouts(None if self.dropout.deterministic else ops.draw_seed(stream()))
        hidden = self.deberta(tokens, mask, types, dropouts)
        pooled = dropouts(self.pooler(hidden, dropouts), self.dropout.rate)
        return self.classifier(pooled)
