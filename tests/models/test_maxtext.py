"""MaxText's layers: in nnx by their class, in a linen decoder by what reads their kernels."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jax_dora
from jax_dora import DoRARule
from jax_dora.linen import apply_dora, coverage, join_adapters, merge_dora, split_adapters
from tests.models.maxtext_models import WIDTH, Decoder

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore"),  # what MaxText warns of is MaxText's
]
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (2, 3, WIDTH))


@pytest.fixture(autouse=True)
def _as_maxtext_computes():
    """MaxText promotes ranks and dtypes as JAX does by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def train(params):
    adapters, frozen = split_adapters(params)
    leaves, structure = jax.tree.flatten(adapters)
    keys = jax.random.split(KEY, len(leaves))
    noise = [jax.random.normal(key, leaf.shape) / 9 for key, leaf in zip(keys, leaves, strict=True)]
    leaves = [leaf * (1 + n) + n for leaf, n in zip(leaves, noise, strict=True)]
    return {"params": join_adapters(jax.tree.unflatten(structure, leaves), frozen)}


def test_dense_general_is_adapted_by_its_class():
    linears = importlib.import_module("maxtext.layers.linears")
    layer = linears.DenseGeneral((2, 4), WIDTH, axis=(-2, -1), rngs=nnx.Rngs(0))
    [one] = jax_dora.coverage(layer).weights
    assert (one.status, one.how) == ("adaptable", "registered, iio")
    model = jax_dora.apply_dora(layer, DoRARule("all-linear", 2, 4), rngs=nnx.Rngs(1))
    assert isinstance(model, linears.DenseGeneral)
    model.lora_b[...] = jax.random.normal(KEY, model.lora_b.shape)
    model.magnitude[...] *= 1.1
    x = jax.random.normal(KEY, (3, 2, 4))
    found, expected = model(x), jax_dora.merge_dora(model)(x)
    assert jnp.allclose(found, expected, atol=1e-5)
    assert not jnp.allclose(found, layer(x), atol=0.1)


def test_a_linen_decoder_scanned_over_axis_1_trains_and_merges():
    model = Decoder()
    table = coverage(model, X)
    assert {one.path: one.how for one in table.weights} == {
        "layers/query": "read by a product, iboo",
        "layers/out": "read by a product, ibio",
        "layers/mlp/wi_0": "read by a product, ibo",
        "layers/mlp/wo": "read by a product, ibo",
    }
    adapted = apply_dora(model, DoRARule("all-linear", 2, 4.0), example=(X,))
    fresh = jax.jit(adapted.init)(KEY, X)
    adapters, frozen = split_adapters(fresh["params"])
    query = adapters["layers"]["query"]
    assert query["lora_a"].value.shape == (3, WIDTH, 2)
    assert query["lora_b"].names == ("layers", None, "heads", "kv")
    with jax.default_matmul_precision("highest"):
        base = jax.jit(model.apply)({"params": frozen}, X)
        assert jnp.allclose(jax.jit(adapted.apply)(fresh, X), base, atol=1e-5)
        trained = train(fresh["params"])
        merged = merge_dora(adapted, trained, X)
        found = jax.jit(adapted.apply)(trained, X)
        assert jnp.allclose(jax.jit(model.apply)(merged, X), found, atol=1e-5)
        assert not jnp.allclose(found, base, atol=0.1)

    @jax.jit
    def gradient(adapters):
        def loss(adapters):
            joined = {"params": join_adapters(adapters, frozen)}
            return jnp.sum(jnp.sin(adapted.apply(joined, X)))

        return jax.grad(loss)(adapters)

    grads = gradient(split_adapters(trained["params"])[0])
    assert all(jnp.any(nn.unbox(one)) for one in jax.tree.leaves(grads))
