"""One layer of the decoder: attention and a gated MLP, each after a norm, with residuals."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jax_dora
from jax_dora.bank.layers import BankLayer, apply_together
from jax_dora.models import activations, attention, rope, segments
from jax_dora.models.cache import LayerCache
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
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        mask: jax.Array | segments.Segments | None,
        memory: LayerCache | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns [batch, time, hidden], and the keys and values of x's tokens."""
        config = self.config
        per_head = (*x.shape[:2], -1, config.head_dim)
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (
            _named(layer, y).reshape(per_head)
            for layer, y in zip(layers, apply_together(layers, x), strict=True)
        )
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope.rotate(q, *angles), rope.rotate(k, *angles)
        if memory is not None:
            attended = memory.attend(q, k, v)
        elif isinstance(mask, segments.Segments):
            attended = segments.attend(q, k, v, mask)
        else:
            attended = attention.attend(
                q, k, v, mask=mask, is_causal=True, implementation=config.attention
            )
        return _project(self.o_proj, attended.reshape(*x.shape[:2], -1)), (k, v)


class MLP(nnx.Module):
    """down(silu(gate(x)) ∘ up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, linear: MakeLinear, rngs: nnx.Rngs) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        options = linear_options(config, config.mlp_bias, rngs)
        self.gate_proj = linear(hidden, intermediate, **options)
        self.up_proj = linear(hidden, intermediate, **options)
        self.down_proj = linear(intermediate, hidden, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        layers = self.gate_proj, self.up_proj
        if isinstance(self.gate_proj, BankLayer):
            gate, up = apply_together(layers, x)
            gated = nnx.silu(gate) * up
        else:
            gated = jax_dora.swiglu(*layers, x)
        return _project(self.down_proj, checkpoint_name(gated, activations.GATED))


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), and then x + mlp(norm(x))."""

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
        mask: jax.Array | segments.Segments | None,
        memory: LayerCache | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns [batch, time, hidden], and the keys and values of x's tokens."""
        normed = checkpoint_name(self._placed(self.input_layernorm(x)), activations.NORMED)
        attended, keys_and_values = self.self_attn(normed, angles, mask, memory)
        x = self._placed(x + attended)
        normed = checkpoint_name(self._placed(self.post_attention_layernorm(x)), activations.NORMED)
        return self._placed(x + self.mlp(normed)), keys_and_values

    def _placed(self, x: jax.Array) -> jax.Array:
        # Otherwise XLA may move activations to weights that are in parts, and not the weights.
        return x if self.rows is None else lax.with_sharding_constraint(x, self.rows)


def _project(layer: Any, x: jax.Array) -> jax.Array:
    return _named(layer, layer(x))


def _named(layer: Any, y: jax.Array) -> jax.Array:
    """Returns a layer's result, which carries `RESULT_NAME`; a DoRA layer gives that name
    itself."""
    return y if isinstance(layer, jax_dora.DoRALayer) else checkpoint_name(y, RESULT_NAME)


def linear_options(config: DecoderConfig, use_bias: bool, rngs: nnx.Rngs) -> dict[str, Any]:
    """Returns the options that every projection and the head are made with."""
    return {
        "use_bias": use_bias,
        "dtype": config.dtype,
        "param_dtype": config.dtype,
        "kernel_init": INIT,
        "rngs": rngs,
    }
