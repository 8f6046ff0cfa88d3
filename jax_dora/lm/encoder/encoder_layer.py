"""A layer of a DeBERTa encoder: attention and an MLP, each with dropout, a residual and a norm."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_dora
from jax_dora import ops
from jax_dora.lm.encoder.encoder_config import DebertaConfig


def _recomputed(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns an activation that keeps nothing but its operand for the backward pass, where JAX
    would keep its derivative. Operands of 16 bits are computed in fp32, and rounded once."""

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    @jax.custom_vjp
    def activation(x: jax.Array) -> jax.Array:
        return function(wide(x)).astype(x.dtype)

    def backward(x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
        # Behind a barrier: what both passes compute would be stored by the first one.
        x = jax.lax.optimization_barrier(x)
        [dx] = jax.vjp(function, wide(x))[1](wide(dy))
        return (dx.astype(x.dtype),)

    activation.defvjp(lambda x: (activation(x), x), backward)
    return activation


def _gelu(x: jax.Array) -> jax.Array:
    # By erf, as in PyTorch: JAX's own has erfc, of three times as many instructions.
    return 0.5 * x * (1 + jax.lax.erf(x * np.sqrt(0.5).astype(x.dtype)))


ACTIVATIONS = {
    "gelu": _recomputed(_gelu),
    "gelu_new": _recomputed(jax.nn.gelu),
    "gelu_pytorch_tanh": _recomputed(jax.nn.gelu),
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Returns x several times, as different arrays for XLA.

    XLA merges small products that share an operand: here, for two copies of all activations, and
    without adding biases inside the products. The gradients are added one after the other, which
    the products do for those before them.
    """
    return (x, *(jax.lax.optimization_barrier((x,) * (count - 1))))


def _add_up(count: int, _: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    return (functools.reduce(lambda total, one: one + total, gradients),)


_copies.defvjp(lambda x, count: (_copies(x, count), None), _add_up)


def _of_positions(layer: Any, positions: jax.Array) -> jax.Array:
    """Returns layer(positions), for a layer that is also applied to hidden states."""
    if type(layer) is not nnx.Linear:
        return layer(positions)
    _, kernel = _copies(layer.kernel[...].astype(positions.dtype), 2)
    y = positions @ kernel
    if layer.bias is None:
        return y
    return y + jnp.broadcast_to(layer.bias[...].astype(y.dtype), y.shape)


def linear(
    inputs: int, outputs: int, config: DebertaConfig, rngs: nnx.Rngs, **options: Any
) -> nnx.Linear:
    """Returns a linear layer with the config's initial weights and dtypes."""
    kernel_init = nnx.initializers.normal(config.initializer_range)
    return nnx.Linear(
        inputs, outputs, kernel_init=kernel_init, **dtypes(config), rngs=rngs, **options
    )


def layer_norm(config: DebertaConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Returns a layer norm of hidden states."""
    return nnx.LayerNorm(
        config.hidden_size, epsilon=config.layer_norm_eps, **dtypes(config), rngs=rngs
    )


def dtypes(config: DebertaConfig) -> dict[str, Any]:
    """Returns the dtypes of a layer, as Flax's arguments."""
    return {"dtype": config.dtype, "param_dtype": config.param_dtype or config.dtype}


class SelfAttention(nnx.Module):
    """Disentangled self-attention, or without relative positions BERT's."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        features = config.num_attention_heads * config.attention_head_size
        make = functools.partial(linear, config.hidden_size, features, config, rngs)
        self.query_proj, self.key_proj, self.value_proj = make(), make(), make()
        self.terms = config.pos_att_type if config.relative_attention else ()
        if self.terms and not config.share_att_key:
            if "c2p" in self.terms:
                self.pos_key_proj = make()
            if "p2c" in self.terms:
                self.pos_query_proj = make()
        self.config = config

    def __call__(
        self,
        inputs: Sequence[jax.Array],
        mask: jax.Array,
        positions: jax.Array | None,
        buckets: np.ndarray,
        dropouts: Dropouts,
    ) -> jax.Array:
        config = self.config

        def heads(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:-1], config.num_attention_heads, -1)

        layers = self.query_proj, self.key_proj, self.value_proj
        if all(type(layer) is nnx.Linear for layer in layers):
            products = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
        else:
            products = jax_dora.apply_layers(layers, inputs[0])
        q, k, v = map(heads, products)
        pos_key = pos_query = None
        if positions is not None:
            positions = dropouts(positions, config.hidden_dropout_prob)
            to_key = self.key_proj if config.share_att_key else getattr(self, "pos_key_proj", None)
            to_query = (
                self.query_proj if config.share_att_key else getattr(self, "pos_query_proj", None)
            )
            if to_key is not None and "c2p" in self.terms:
                pos_key = heads(_of_positions(to_key, positions))
            if to_query is not None and "p2c" in self.terms:
                pos_query = heads(_of_positions(to_query, positions))
        dropout = dropouts.next(config.attention_probs_dropout_prob)
        options: Any = {"dropout": dropout, "implementation": config.attention}
        attended = ops.disentangled_attention(
            q, k, v, pos_key, pos_query, buckets, mask=mask, **options
        )
        return attended.reshape(*attended.shape[:-2], -1)


class Output(nnx.Module):
    """Computes norm(dropout(dense(y)) + x)."""

    def __init__(self, inputs: int, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        self.dense = linear(inputs, config.hidden_size, config, rngs)
        self.LayerNorm = layer_norm(config, rngs)
        self.rate = config.hidden_dropout_prob

    def __call__(self, y: jax.Array, x: jax.Array, dropouts: Dropouts) -> jax.Array:
        norm: Any = self.LayerNorm
        options: Any = {"epsilon": norm.epsilon, "dropout": dropouts.next(self.rate)}
        return ops.residual_layer_norm(self.dense(y), x, norm.scale[...], norm.bias[...], **options)


class Attention(nnx.Module):
    """Self-attention and its output."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        self.self = SelfAttention(config, rngs)
        features = config.num_attention_heads * config.attention_head_size
        self.output = Output(features, config, rngs)


class Intermediate(nnx.Module):
    """Computes act(dense(x))."""

    def __init__(self, config: DebertaConfig, rngs: nnx.Rngs) -> None:
        self.dense = linear(config.hidden_size, config.intermediate_size, config, rngs)
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
        x, *inputs = _copies(x, 4)
        attended = self.attention.self(inputs, mask, positions, buckets, dropouts)
        x = self.attention.output(attended, x, dropouts)
        return self.output(self.intermediate(x), x, dropouts)
