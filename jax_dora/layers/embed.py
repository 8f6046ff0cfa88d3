"""DoRA for nnx.Embed."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from jax_dora import ops
from jax_dora.layers.adapter import DoRALayer, no_out_sharding
from jax_dora.layers.layout import Layout, matrix_layout
from jax_dora.ops.mesh import left_to_xla
from jax_dora.reuse import current_norm


class DoRAEmbed(DoRALayer, nnx.Embed):
    """y = g∘E[ids] + g∘(s·lora_a[ids] lora_b) with g = magnitude / ‖E + s·lora_a lora_b‖.

    The norm is of each feature, over the vocabulary. As in PEFT, lora_a starts at zero and lora_b
    normal.

    Args:
      base: the embedding.
      dropout: 0: an embedding reads no activation.
      adapt_attend: whether `attend`, by which a model ties its output head to the embedding,
        multiplies by the adapted embedding. True is what merging computes, since a merged embedding
        is one array for both uses. False leaves the head as it was, as PEFT does, in whose files an
        embedding's adapter does not reach the head: `jax_dora.peft.load_adapter` sets it so.
      **options: as `DoRALayer`'s.

    Attributes:
      embedding: [vocabulary, features].
      lora_a: [vocabulary, rank].
      lora_b: [rank, features].
      magnitude: [features].
    """

    base_type = nnx.Embed
    kernel_name = "embedding"
    default_inits: ClassVar[Mapping[str, Initializer]] = {
        "lora_a": nnx.initializers.zeros_init(),
        "lora_b": nnx.initializers.normal(1.0),
    }

    def __init__(
        self,
        base: nnx.Embed,
        *,
        dropout: float = 0.0,
        adapt_attend: bool = True,
        **options: Any,
    ) -> None:
        if dropout:
            raise ValueError(
                f"dropout is {dropout} for an embedding, which reads token ids and has no "
                "activation to drop; expected 0: give embeddings a rule of their own"
            )
        if not isinstance(adapt_attend, bool):
            raise TypeError(f"adapt_attend is {adapt_attend!r}; expected True or False")
        super().__init__(base, **options)
        self.adapt_attend = adapt_attend

    def layout(self) -> Layout:
        return matrix_layout(self.num_embeddings, self.features, self.rank)

    def adapter_axes(self, axes: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
        return {"lora_a": (axes[0], None), "lora_b": (None, axes[1]), "magnitude": (axes[1],)}

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Integers [...] to [..., features], in the dtype that `nnx.Embed` would return, sharded as
        it would be."""
        base = nnx.Embed.__call__(self, inputs, out_sharding)
        take = functools.partial(jnp.take, axis=0)
        if out_sharding is not None:
            spec = getattr(out_sharding, "spec", out_sharding)
            mesh = jax.typeof(base).sharding.mesh
            take = left_to_xla(take, mesh, jax.P(*spec[:-1], None))
        rows = take(self.lora_a[...], inputs).astype(base.dtype)
        lora = rows @ self.lora_b[...].astype(base.dtype)
        if out_sharding is not None:
            lora = jax.reshard(lora, jax.typeof(base).sharding)
        return ops.compose(
            base, lora, self._g(base.dtype), self.scale, implementation=self.implementation
        )

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., features] to [..., vocabulary]: the product with the adapted embedding, or with
        `embedding` itself where `adapt_attend` is False."""
        if not self.adapt_attend:
            return nnx.Embed.attend(self, query, out_sharding)
        no_out_sharding(out_sharding)
        query, embedding = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        dtype = query.dtype
        g = self._g(dtype)
        g = g.reshape((1,) * (query.ndim - 1) + g.shape)
        scaled = (g * query.astype(g.dtype)).astype(dtype)
        z = scaled @ (self.scale * self.lora_b[...]).astype(dtype).T
        return scaled @ embedding.T + z @ self.lora_a[...].astype(dtype).T

    def _g(self, dtype: Any) -> jax.Array:
        norm = current_norm(self)
        return ops.magnitude_scale(self.magnitude[...], norm, dtype)
