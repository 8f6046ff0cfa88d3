"""One layer of the decoder: attention and a gated MLP, each with a norm and a residual."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jax_dora
from jax_dora.lm.models import activations, rope
from jax_dora.lm.models.attention import Segments, attend, attend_segments
from jax_dora.lm.models.cache import LayerCache
from jax_dora.lm.models.config import DecoderConfig

# Makes a projection: nnx.Linear, or a callable with its arguments that returns an adapted layer.
MakeLinear = Callable[..., Any]
INIT = nnx.initializers.normal(0.02)


class RMSNorm(nnx.Module):
    """scale ∘ x / sqrt(mean(x²) + epsilon) over the last axis (arXiv 1910.07467)."""

    def __init__(self, features: int, config: DecoderConfig) -> None:
        self.scale = nnx.Param(jnp.ones((features,), config.dtype))
        self.epsilon = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return self._normed(x, jnp.mean(wide * wide, axis=-1))

    def with_largest(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns norm(x), and the largest result of each row before rounding f32[...], by its
        absolute value.

        It is known when the mean is, so XLA computes both in one pass. Without the barrier it may
        leave the largest to the pass that computes the results, and code them in a third one.
        """
        wide = x.astype(jnp.float32)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        largest = jnp.max(jnp.abs(wide * scale), axis=-1)
        mean_square = jnp.mean(wide * wide, axis=-1)
        mean_square, largest = lax.optimization_barrier((mean_square, largest))
        return self._normed(x, mean_square), largest * lax.rsqrt(mean_square + self.epsilon)

    def _normed(self, x: jax.Array, mean_square: jax.Array) -> jax.Array:
        """Returns norm(x) of x [..., features], with the mean of each row's squares f32[...]."""
        root = lax.rsqrt(mean_square[..., None] + self.epsilon)
        # A scale that is trained is float32.
        scale = self.scale[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        return (x.astype(jnp.float32) * root).astype(x.dtype) * scale


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary position embedding."""

    def __init__(self, config: DecoderConfig, linear: MakeLinear, rngs: nnx.Rngs) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = linear_options(config, config.qkv_bias, rngs)
        self.q_proj = linear(hidden, heads * head_dim, **qkv)
        self.k_proj = linear(hidden, kv_heads * head_dim, **qkv)
        self.v_proj = linear(hidden, kv_heads * head_dim, **qkv)
        self.o_proj = linear(
            heads * head_dim, hidden, **linear_options(config, config.o_bias, rngs)
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config)
            self.k_norm = RMSNorm(head_dim, config)
        self.config = config

    def __call__(
        self,
        x: Any,
        angles: tuple[jax.Array, jax.Array],
        mask: jax.Array | Segments | None,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the result [batch, time, hidden], and the keys and values of x's tokens."""
        config = self.config
        layers, size = (self.q_proj, self.k_proj, self.v_proj), config.head_dim
        q, k, v = (
            y.reshape(*x.shape[:2], y.shape[-1] // size, size)
            for y in jax_dora.apply_layers(layers, x)
        )
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope.rotate(q, *angles), rope.rotate(k, *angles)
        if cache is not None:
            attended = cache.attend(q, k, v)
        elif isinstance(mask, Segments):
            attended = attend_segments(q, k, v, mask)
        else:
            options = {"is_causal": True, "implementation": config.attention}
            attended = attend(q, k, v, mask=mask, window=config.sliding_window, **options)
        attended = attended.reshape(*x.shape[:2], config.num_attention_heads * size)
        [y] = jax_dora.apply_layers([self.o_proj], attended)
        return y, (k, v)


class MLP(nnx.Module):
    """down(silu(gate(x)) ∘ up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, linear: MakeLinear, rngs: nnx.Rngs) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        options = linear_options(config, config.mlp_bias, rngs)
        self.gate_proj = linear(hidden, intermediate, **options)
        self.up_proj = linear(hidden, intermediate, **options)
        self.down_proj = linear(intermediate, hidden, **options)

    def __call__(self, x: Any) -> jax.Array:
        gated = jax_dora.swiglu(self.gate_proj, self.up_proj, x, into=self.down_proj)
        gated = _on_x(functools.partial(checkpoint_name, name=activations.GATED), gated)
        [y] = jax_dora.apply_layers([self.down_proj], gated)
        return y


class DecoderLayer(nnx.Module):
    """Computes x + attention(norm(x)), and then x + mlp(norm(x))."""

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
        mask: jax.Array | Segments | None,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the result [batch, time, hidden], and the keys and values of x's tokens."""
        attention, mlp = self.self_attn, self.mlp
        qkv = attention.q_proj, attention.k_proj, attention.v_proj
        normed = self._normed(self.input_layernorm, x, *qkv)
        attended, keys_and_values = attention(normed, angles, mask, cache)
        x = self._sharded(x + attended)
        normed = self._normed(self.post_attention_layernorm, x, mlp.gate_proj, mlp.up_proj)
        return self._sharded(x + mlp(normed)), keys_and_values

    def _normed(self, norm: RMSNorm, x: jax.Array, *layers: Any) -> Any:
        """Returns norm(x) as `layers` take it."""
        normed = jax_dora.layer_inputs(layers, norm(x), lambda: norm.with_largest(x))
        return _on_x(lambda y: checkpoint_name(self._sharded(y), activations.NORMED), normed)

    def _sharded(self, x: jax.Array) -> jax.Array:
        # Without the constraint XLA may gather activations instead of the sharded weights.
        return x if self.rows is None else lax.with_sharding_constraint(x, self.rows)


def _on_x(function: Callable[[jax.Array], jax.Array], inputs: Any) -> Any:
    """Returns the inputs of layers after `function` of x, which is their first leaf."""
    (x, *codes), structure = jax.tree.flatten(inputs)
    return structure.unflatten([function(x), *codes])


def linear_options(config: DecoderConfig, use_bias: bool, rngs: nnx.Rngs) -> dict[str, Any]:
    """Returns the keyword arguments for a projection or the head."""
    return {
        "use_bias": use_bias,
        "dtype": config.dtype,
        "param_dtype": config.dtype,
        "kernel_init": INIT,
        "rngs": rngs,
    }
