"""Flax's lm1b example, a linen decoder whose parameters have logical axis names: adapted whole.

The structure is the example's: attention kernels of three axes that two names stand for, biases
with names of their own, an embedding and a head that are not tied.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import traverse_util

from jax_dora import DoRARule
from jax_dora.linen import apply_dora
from tests.whole_models import check_linen

VOCABULARY, WIDTH, HEADS, HIDDEN = 13, 8, 2, 12
KEY = jax.random.key(0)


def names(init, *axes):
    return nn.with_logical_partitioning(init, axes)


class Block(nn.Module):
    """Causal attention and an MLP."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        uniform, normal = nn.initializers.xavier_uniform(), nn.initializers.normal(1e-6)
        h = nn.LayerNorm(
            bias_init=names(nn.initializers.zeros, "embed"),
            scale_init=names(nn.initializers.ones, "embed"),
        )(x)
        x = x + nn.MultiHeadDotProductAttention(
            HEADS,
            kernel_init=names(uniform, "embed", "kv"),
            bias_init=names(nn.initializers.zeros, "kv"),
            use_bias=False,
        )(h, mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))
        h = nn.Dense(
            HIDDEN, kernel_init=names(uniform, "embed", "mlp"), bias_init=names(normal, "mlp")
        )(nn.LayerNorm()(x))
        return x + nn.Dense(
            WIDTH, kernel_init=names(uniform, "mlp", "embed"), bias_init=names(normal, "embed")
        )(nn.relu(h))


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        uniform, normal = nn.initializers.xavier_uniform(), nn.initializers.normal(1.0)
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=names(normal, "vocab", "embed"))(ids)
        for _ in range(2):
            x = Block()(x)
        head = nn.Dense(
            VOCABULARY,
            kernel_init=names(uniform, "embed", "vocab"),
            bias_init=names(nn.initializers.zeros, "vocab"),
        )
        return head(nn.LayerNorm()(x))


@pytest.mark.slow
def test_every_weight_is_adapted_trained_and_merged():
    model, ids = Model(), jax.random.randint(KEY, (3, 6), 0, VOCABULARY)
    base = jax.jit(model.init)(KEY, ids)
    layers = DoRARule(r".*(query|key|value|out|Dense_\d|Embed_0)", 2, 4.0)
    adapted = apply_dora(model, layers)
    adapters = check_linen(model, adapted, base, (ids,))
    places = {path[:-1] for path in traverse_util.flatten_dict(adapters)}
    assert len(places) == 14
    query = adapters["Block_0"]["MultiHeadDotProductAttention_0"]["query"]
    assert query["lora_b"].names == (None, "kv", None)
