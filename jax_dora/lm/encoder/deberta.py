"""DeBERTa-v2 and v3 (arXiv 2006.03654, 2111.09543) with a head that classifies texts.

Attributes have the names of Hugging Face's modules: the torch path
`deberta.encoder.layer.7.attention.self.query_proj` is `deberta/encoder/layer/7/attention/self/
query_proj` here, and a PEFT folder needs no translation.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dora import ops
from jax_dora.lm.encoder.encoder_config import DebertaConfig
from jax_dora.lm.encoder.encoder_layer import (
    ACTIVATIONS,
    Dropouts,
    Layer,
    dtypes,
    layer_norm,
    linear,
)
from jax_dora.lm.encoder.relative_positions import buckets_of
from jax_dora.lm.models.decoder import loop_options


def _embed(rows: int, features: int, config: DebertaConfig, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(config.initializer_range)
    return nnx.Embed(rows, features, embedding_init=init, **dtypes(config), rngs=rngs)


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
            self.embed_proj = linear(size, config.hidden_size, config, rngs, use_bias=False)
        self.LayerNorm = layer_norm(config, rngs)
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
            **dtypes(config),
            rngs=rngs,
        )
        self.LayerNorm = layer_norm(config, rngs)
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
            self.LayerNorm = layer_norm(config, rngs)
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
        self.dense = linear(config.pooler_hidden_size, config.pooler_hidden_size, config, rngs)
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
        self.classifier = linear(config.pooler_hidden_size, config.num_labels, config, rngs)

    @property
    def step_options(self) -> tuple[tuple[str, bool | int], ...]:
        """`compiler_options` of `jax.jit`, as items, for a training step.

        Products are cuBLAS's, which adds biases and other gradients. XLA's choice between cuBLAS
        and its own Triton products does not count the passes over all activations that these
        additions take outside of a product. An encoder with quantised kernels has none: Triton
        dequantises them inside a product.
        """
        return loop_options(nnx.state(self))

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
