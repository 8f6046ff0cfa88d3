"""MaxText's models, whole, and its layers: in nnx by their class, in a linen decoder by what reads
their kernels."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jax_dora
from jax_dora import DoRARule
from jax_dora.linen import apply_dora, coverage, join_adapters, merge_dora, split_adapters
from tests.models.maxtext_models import (
    MODELS,
    TOKENS,
    WIDTH,
    Decoder,
    by_provider,
    call,
    experts,
    made,
)
from tests.whole_models import check_nnx, difference

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore"),  # what MaxText warns of is MaxText's
]
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (2, 3, WIDTH))


def _moved(params):
    adapters, frozen = split_adapters(params)
    leaves, structure = jax.tree.flatten(adapters)
    keys = jax.random.split(KEY, len(leaves))
    noise = [jax.random.normal(key, leaf.shape) / 9 for key, leaf in zip(keys, leaves, strict=True)]
    leaves = [leaf * (1 + n) + n for leaf, n in zip(leaves, noise, strict=True)]
    return {"params": join_adapters(jax.tree.unflatten(structure, leaves), frozen)}


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_trains_and_merges(name, tmp_path):
    base = made(name)
    table = jax_dora.coverage(base, call)
    linear = {one.path: one for one in table.weights if one.is_linear}
    others = {one.path for one in table.weights if one.path not in linear}
    counts = {"decoder": 7, "MoE": 8, "DeepSeek": 20, "Qwen3-Next": 15, "Gemma 4": 14}
    assert len(linear) == counts[name]
    tables = {"token_embedder", "decoder/logits_dense"}
    assert {one.path for one in table.weights if one.status == "adaptable"} == {
        *linear,
        *tables,
        *(one for one in others if one.endswith("conv1d")),
    }
    assert not any(one.merged_bytes for one in table.weights)
    # Without inputs, MaxText's own metadata say along which axis layers are stacked.
    by_class = {one.path: one.how for one in jax_dora.coverage(base).weights}
    assert all(by_class[path] == one.how for path, one in linear.items())

    rules = [DoRARule("all-linear", 4, 8), DoRARule("|".join(tables), 4, 8)]
    model = jax_dora.apply_dora(base, rules, rngs=nnx.Rngs(1), example=call)
    result = check_nnx(model, base, call, TOKENS, 2e-5)
    if name == "decoder":
        assert difference(nnx.jit(call)(jax_dora.freeze(model)), result.logits) <= 2e-5
        linear = jax_dora.apply_dora(base, rules[0], rngs=nnx.Rngs(2))
        jax_dora.peft.save_adapter(linear, tmp_path)
        loaded = jax_dora.peft.load_adapter(base, tmp_path)
        arrays = [jax_dora.get_adapter(one).arrays for one in (linear, loaded)]
        assert jax.tree.all(jax.tree.map(np.array_equal, *arrays))


def test_maxtexts_own_call_gives_dora_by_our_provider(monkeypatch):
    """`_build_lora_provider` takes the provider from qwix."""
    qwix = importlib.import_module("qwix")
    owners = []
    for provider in (qwix.LoraProvider, jax_dora.provider.DoRAProvider):
        monkeypatch.setattr(qwix, "LoraProvider", provider)
        base, model = by_provider()
        state = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
        owners.append({path[:-1] for path, _ in state})
    assert owners[0] == owners[1]
    assert len(state) == 3 * 7
    check_nnx(model, base, call, TOKENS, 2e-5)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["every expert", "ragged"])
def test_routed_experts_are_adapted_by_their_class(is_sparse):
    """Ragged products stand in a `shard_map`, which is given W'."""
    base = experts(sparse_matmul=is_sparse)
    x = jax.random.normal(KEY, (2, 5, 8))
    table = jax_dora.coverage(base, x)
    assert {one.path: one.how for one in table.weights} == {
        "gate": "registered, io",
        **dict.fromkeys(("wi_0", "wi_1", "wo"), "registered, bio"),
    }
    assert [bool(one.merged_bytes) for one in table.weights if one.path != "gate"] == [
        is_sparse
    ] * 3
    model = jax_dora.apply_dora(base, DoRARule("all-linear", 2, 4), rngs=nnx.Rngs(1))
    assert type(model).__mro__[1] is type(base)
    assert model.wo_magnitude.shape == (3, 8)
    call = nnx.jit(lambda model, x: model(x)[0])
    assert difference(call(model, x), call(base, x)) <= 1e-6
    leaves, structure = jax.tree.flatten(nnx.state(model, nnx.LoRAParam))
    noise = [jax.random.normal(jax.random.key(n), one.shape) / 9 for n, one in enumerate(leaves)]
    leaves = [one * (1 + n) + n for one, n in zip(leaves, noise, strict=True)]
    nnx.update(model, jax.tree.unflatten(structure, leaves))
    found = call(model, x)
    assert difference(found, call(jax_dora.merge_dora(model), x)) <= 2e-5
    assert difference(found, call(base, x)) > 0.1

    @nnx.jit
    def gradient(model):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        return nnx.grad(lambda model: jnp.sum(jnp.sin(model(x)[0])), argnums=wrt)(model)

    flat = nnx.to_flat_state(gradient(model))
    assert len(flat) == 3 * 4
    assert not [path for path, one in flat if not bool(jnp.any(one[...] != 0))]


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
        trained = _moved(fresh["params"])
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


def test_its_converter_leaves_the_magnitudes_out():
    """As docs/magnitudes.md says. A change here means that the page and the message about Orbax
    checkpoints are outdated."""
    convert = importlib.import_module("maxtext.checkpoint_conversion.to_huggingface")
    key = "params-decoder-layers-mlp-wi_0-kernel"
    state = {f"{key}_{name}": np.ones((4, 1, 3)) for name in ("lora_a", "lora_b", "magnitude")}
    found, _ = convert._transform_weights_to_adapter(
        {key: ["model.layers.0.mlp.gate_proj.weight"]}, state
    )
    assert {name.partition("gate_proj.")[2] for name in found} == {"lora_A.weight", "lora_B.weight"}
