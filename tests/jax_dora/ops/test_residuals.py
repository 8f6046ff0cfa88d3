"""A jitted function is traced once, and may be differentiated at two places with respect to
different arguments."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dora import ops
from jax_dora.ops.residuals import pack, unpack
from tests.tables import thinned

FEATURES, RANK = 16, 4


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 4, jnp.float32)


def linear(x, kernel, adapter):
    return ops.dora_linear(x, kernel, **adapter, scale=0.7)


def kept(x, kernel, adapter):
    return ops.dora_linear(x, kernel, **adapter, scale=0.7, keep_inner=True)


def inner(x, kernel, adapter):
    return ops.lora_linear(x, kernel, adapter["lora_a"], adapter["lora_b"], 0.7)


def composed(x, kernel, adapter):
    lora = (x @ adapter["lora_a"]) @ adapter["lora_b"]
    return ops.compose(x @ kernel, lora, adapter["magnitude"], 0.7)


def gated(x, kernel, adapter):
    g, bias = adapter["magnitude"], adapter["bias"]
    return ops.swiglu(x @ kernel, inner(x, kernel, adapter), g, g, gate_bias=bias)


@pytest.mark.parametrize(
    ("layer", "trained"),
    thinned(
        itertools.product(
            [linear, kept, inner, composed, gated],
            [("lora_a",), ("magnitude", "bias"), ("lora_b", "magnitude")],
        ),
        [
            (linear, ("magnitude", "bias")),
            (kept, ("lora_b", "magnitude")),
            (inner, ("lora_a",)),
            (composed, ("lora_a",)),
            (gated, ("lora_b", "magnitude")),
        ],
    ),
)
@pytest.mark.ci
def test_one_traced_layer_twice(layer, trained):
    """x is a constant of the first call, and differentiated in the second."""
    adapters = [
        {
            "lora_a": draw(seed, FEATURES, RANK),
            "lora_b": draw(seed + 1, RANK, FEATURES),
            "magnitude": 2 + draw(seed + 2, FEATURES),
            "bias": draw(seed + 3, FEATURES),
        }
        for seed in (0, 4)
    ]
    kernels, x = (draw(8, FEATURES, FEATURES), draw(9, FEATURES, FEATURES)), draw(10, 6, FEATURES)

    def gradient(call):
        def loss(given, everything):
            first, second = ({**rest, **one} for rest, one in zip(everything, given, strict=True))
            return jnp.sum(call(call(x, kernels[0], first), kernels[1], second) ** 2)

        given = [{name: adapter[name] for name in trained} for adapter in adapters]
        # Fewer parameters are trained in the second layer than in the first.
        given[1] = {name: given[1][name] for name in trained[:1]}
        return jax.grad(loss)(given, adapters)

    for one, other in zip(
        jax.tree.leaves(gradient(jax.jit(layer))), jax.tree.leaves(gradient(layer)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_packed_trees_have_the_same_structure():
    trees = [{"x": x, "y": (None, jnp.ones(2))} for x in (None, True, jnp.ones((3, 0)))]
    assert len({jax.tree.structure(pack(tree)) for tree in trees}) == 1
    for tree in trees:
        assert jax.tree.structure(unpack(pack(tree))) == jax.tree.structure(tree)
