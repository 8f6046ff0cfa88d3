"""Flax's lm1b example, a linen decoder whose parameters have logical axis names: adapted whole.

The structure is the example's: attention kernels of three axes that two names stand for, biases
with names of their own, an embedding and a head that are not tied.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import traverse_util

from jax_dora import DoRARule
from jax_dora.linen import apply_dora, join_adapters, merge_dora, split_adapters
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS

VOCABULARY, WIDTH, HEADS, HIDDEN, STEPS = 13, 8, 2, 12, 20
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
    add = functools.partial(adapted.apply, rngs={"params": KEY}, mutable=["params"])
    _, variables = jax.jit(add)(base, ids)
    adapters, frozen = split_adapters(variables["params"])
    places = {path[:-1] for path in traverse_util.flatten_dict(adapters)}
    assert len(places) == 14
    query = adapters["Block_0"]["MultiHeadDotProductAttention_0"]["query"]
    assert query["lora_b"].names == (None, "kv", None)
    fresh, expected = jax.jit(adapted.apply)(variables, ids), jax.jit(model.apply)(base, ids)
    assert jnp.array_equal(fresh, expected)

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(adapters, state):
        def loss(adapters):
            logits = adapted.apply({"params": join_adapters(adapters, frozen)}, ids)[:, :-1]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
            return jnp.mean(losses)

        value, grads = jax.value_and_grad(loss)(adapters)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(adapters, updates), state, value, grads

    state, losses, grads = optimizer.init(adapters), [], None
    for _ in range(STEPS):
        adapters, state, value, grads = step(adapters, state)
        losses.append(value)
    assert losses[-1] < losses[0]
    assert all(np.any(grad) for grad in jax.tree.leaves(grads))

    trained = {"params": join_adapters(adapters, frozen)}
    merged = merge_dora(adapted, trained, ids)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    with jax.default_matmul_precision("highest"):
        one, other = jax.jit(adapted.apply)(trained, ids), jax.jit(model.apply)(merged, ids)
    np.testing.assert_allclose(one, other, rtol=0, atol=OPERATOR_FP32_MAX_ABS)
    assert not np.allclose(one, expected, atol=1e-2)
