"""DoRA for nnx.Embed."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from jax_dora import ops
from jax_dora.layers.base_layer import class_attribute
from jax_dora.layers.dora_layer import DoRALayer
from jax_dora.layers.magnitude import g_of_call
from jax_dora.layers.out_sharding import with_out_sharding
from jax_dora.layers.rule import DoRARule
from jax_dora.ops.dispatch.mesh import with_auto_axes
from jax_dora.ops.linear import times_transposed


class DoRAEmbed(DoRALayer, nnx.Embed):
    """y = g∘E[ids] + g∘(s·lora_a[ids] lora_b) with g = magnitude / ‖E + s·lora_a lora_b‖.

    The norm is taken per feature, over the vocabulary. As in PEFT, lora_a starts at zero and lora_b
    is drawn from a normal distribution. Dropout must be 0, since an embedding reads no activation.

    A model with a tied output head calls `attend`. With adapt_attend=False, `attend` multiplies by
    the base embedding. PEFT does the same: its embedding adapters do not reach the head, so
    `jax_dora.peft.load_adapter` sets adapt_attend=False. Merging then unties the head.

    Attributes:
      embedding: [vocabulary, features].
      lora_a: [vocabulary, rank].
      lora_b: [rank, features].
      magnitude: [features].
    """

    base_type = class_attribute(nnx.Embed)
    kernel_name = "embedding"
    takes = frozenset({"adapt_attend"})
    default_inits: ClassVar[Mapping[str, Initializer]] = {
        "lora_a": nnx.initializers.zeros_init(),
        "lora_b": nnx.initializers.normal(1.0),
    }

    @classmethod
    def check(cls, base: Any, options: DoRARule) -> None:
        super().check(base, options)
        if options.dropout:
            raise ValueError(
                f"dropout is {options.dropout} for an embedding, which reads token ids and has no "
                "activation to drop; expected 0: use a separate rule for embeddings"
            )

    @classmethod
    def unstacked_shape(cls, module: Any) -> tuple[int, ...]:
        return module.num_embeddings, module.features

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the adapted rows of integers [...]: [..., features], with the dtype and the
        sharding of `nnx.Embed`'s result."""
        base = nnx.Embed.__call__(self, inputs, out_sharding)

        def expand(inputs: jax.Array, lora_a: jax.Array, lora_b: jax.Array) -> jax.Array:
            rows = jnp.take(lora_a, inputs, axis=0).astype(base.dtype)
            return rows @ lora_b.astype(base.dtype)

        if out_sharding is not None:
            sharding = jax.typeof(base).sharding
            expand = with_auto_axes(expand, sharding.mesh, sharding.spec)
        lora = expand(inputs, self.lora_a[...], self.lora_b[...])
        return ops.compose(
            base, lora, g_of_call(self, base.dtype), self.scale, implementation=self.implementation
        )

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Multiplies [..., features] by the transposed adapted embedding, or by the transposed
        `embedding` if `adapt_attend` is False; returns [..., vocabulary]."""
        if not self.adapt_attend:
            return nnx.Embed.attend(self, query, out_sharding)
        query, embedding = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        operands = {
            "x": query,
            "kernel": embedding,
            "lora_a": self.lora_a[...],
            "lora_b": self.lora_b[...],
            "g": g_of_call(self, query.dtype),
        }
        return with_out_sharding(
            out_sharding, lambda arrays: times_transposed(**arrays, scale=self.scale), operands
        )
