"""Linen modules inside an nnx model, which `nnx.bridge.ToNNX` holds, as in openpi's Pi0."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jax_dora
from jax_dora import DoRARule, apply_dora, coverage, merge_dora, remove_dora
from jax_dora.peft import load_adapter, save_adapter

WIDTH, LAYERS = 6, 3
x = jax.random.normal(jax.random.key(0), (4, WIDTH))
RULE = DoRARule("all-linear", rank=2, alpha=3.0)
NAMES = ("kernel", "lora_a", "lora_b", "magnitude")
PATHS = ["body", "body/down", "body/layers/heads", "out"]  # "body" is its w.


class Layer(nn.Module):
    """One of a stack."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.DenseGeneral((2, 3), use_bias=False, name="heads")(nn.LayerNorm(name="norm")(x))
        return x + jnp.tanh(y).reshape(x.shape), None


class Body(nn.Module):
    """A scanned stack, a layer, a weight of its own, and statistics that a call updates."""

    is_training: bool = False

    @nn.compact
    def __call__(self, x):
        scan = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": LAYERS}
        x, _ = nn.scan(nn.remat(Layer), **scan)(name="layers")(x, None)
        mean = self.variable("batch_stats", "mean", jnp.zeros, (1, WIDTH))
        if self.is_training:
            mean.value = x.mean(0, keepdims=True)
        w = self.param("w", nn.initializers.normal(0.5), (WIDTH, WIDTH))
        return nn.Dense(WIDTH, name="down")(jnp.tanh(x @ w)) + mean.value

    def doubled(self, x):
        return 2 * self(x)


class Model(nnx.Module):
    def __init__(self, rngs, body):
        self.body = nnx.bridge.ToNNX(body, rngs=rngs).lazy_init(x)
        self.out = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x):
        return self.out(self.body(x))


@pytest.fixture(scope="module")
def base():
    return Model(nnx.Rngs(0), Body())


@pytest.fixture(scope="module")
def trained(base):
    """Every adapter has been changed."""
    model = apply_dora(base, RULE, rngs=nnx.Rngs(1), example=(x,))
    drawn = np.random.default_rng(0)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.LoRAParam):
            change = drawn.normal(size=variable.shape) * 0.3
            variable[...] = variable[...] * jnp.asarray(1 + 0.3 * change) + change
    return model


def count(model):
    return len(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))


@pytest.mark.ci
def test_a_fresh_adapter_adapts_all_of_it_and_changes_nothing(base):
    model = apply_dora(base, RULE, rngs=nnx.Rngs(1), example=(x,))
    assert sorted(jax_dora.get_adapter(model).arrays) == PATHS
    assert count(model) == 3 * len(PATHS)
    np.testing.assert_allclose(model(x), base(x), rtol=1e-6, atol=1e-6)
    told = {one.path: one.status for one in coverage(model, x).weights}
    assert [path for path, status in sorted(told.items()) if status == "adapted"] == PATHS
    assert type(base.body.down) is dict


def merged(kernel, lora_a, lora_b, magnitude):
    """W' in fp64 NumPy."""
    kernel, lora_a, lora_b, magnitude = map(np.float64, (kernel, lora_a, lora_b, magnitude))
    changed = kernel + 1.5 * np.tensordot(lora_a, lora_b, 1)
    return jnp.asarray(magnitude * changed / np.linalg.norm(changed, axis=0), x.dtype)


@pytest.mark.ci
def test_it_computes_with_the_weights_of_the_paper(base, trained):
    """Compared with the linen module itself and W' of NumPy."""
    expected, body = nnx.clone(base), trained.body
    heads = [body.layers["heads"][name][...] for name in NAMES]
    layers = [merged(*(array[number] for array in heads)) for number in range(LAYERS)]
    expected.body.layers["heads"]["kernel"][...] = jnp.stack(layers)
    expected.body.down["kernel"][...] = merged(*(body.down[name][...] for name in NAMES))
    own = [body.w[...], *(getattr(body, f"w_{name}")[...] for name in NAMES[1:])]
    expected.body.w[...] = merged(*own)
    expected.out.kernel[...] = merged(*(getattr(trained.out, name)[...] for name in NAMES))
    wanted = expected(x)
    assert jnp.abs(wanted - base(x)).max() > 0.1
    np.testing.assert_allclose(trained(x), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(trained.body.doubled(x), expected.body.doubled(x), atol=1e-5)


@pytest.mark.ci
def test_every_function_sees_all_of_it(base, trained, tmp_path):
    y = trained(x)
    assert sorted(jax_dora.norms(trained)) == PATHS
    assert (jax_dora.freeze(trained)(x) == y).all()
    assert (jax_dora.with_norms(trained, jax_dora.norms(trained))(x) == y).all()
    assert (jax_dora.set_adapter(base, jax_dora.get_adapter(trained))(x) == y).all()
    save_adapter(trained, tmp_path)
    assert (load_adapter(base, tmp_path, example=(x,))(x) == y).all()
    assert (load_adapter(trained, tmp_path)(x) == y).all()
    with pytest.raises(ValueError, match=r"body\.down\..* a linen module's.*load_adapter example="):
        load_adapter(base, tmp_path)
    plain = merge_dora(trained)
    np.testing.assert_allclose(plain(x), y, rtol=1e-5, atol=1e-5)
    assert (remove_dora(trained)(x) == base(x)).all()
    for one in (plain, remove_dora(trained), jax_dora.set_adapter(trained, None)):
        assert nnx.graphdef(one) == nnx.graphdef(base)
    again = nnx.clone(trained)
    jax_dora.reset_magnitudes(again)
    norms = jax_dora.norms(trained)
    assert (again.body.down["magnitude"][...] == norms["body/down"]).all()


@pytest.mark.ci
def test_an_optimizer_of_adapters_trains_all_of_it(trained):
    model = nnx.clone(trained)
    before = nnx.state(trained, nnx.LoRAParam)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    wrt = nnx.DiffState(0, nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(x) ** 2), argnums=wrt)(model))

    step(model, optimizer)
    changed = jax.tree.map(
        lambda old, new: bool((old != new).any()), before, nnx.state(model, nnx.LoRAParam)
    )
    assert all(jax.tree.leaves(changed))


@pytest.mark.ci
def test_a_call_that_updates_statistics_keeps_the_adapters():
    base = Model(nnx.Rngs(0), Body(is_training=True))
    model = apply_dora(
        base,
        DoRARule("body|body/(down|layers/heads)", 2, 3.0),
        rngs=nnx.Rngs(1),
        example=lambda model: model.body(x, mutable=["batch_stats"]),
    )
    means = []
    for one in (base, model):
        one.body(x, mutable=["batch_stats"])
        means.append(nnx.state(one.body, nnx.BatchStat)["mean"][...])
    np.testing.assert_allclose(*means, rtol=1e-6, atol=1e-6)
    assert (means[0] != 0).any()
    assert count(model) == 9
    assert sorted(jax_dora.norms(model)) == PATHS[:-1]


@pytest.mark.parametrize("dense", [nn.Dense(5), nn.Dense(5, use_bias=False)])
def test_a_layer_alone(dense):
    base: Any = nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(x)
    model = apply_dora(base, RULE, rngs=nnx.Rngs(1), example=(x,))
    model.magnitude[...] *= 2
    bias = base.bias[...][None] if dense.use_bias else 0
    np.testing.assert_allclose(model(x) - bias, 2 * (base(x) - bias), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(merge_dora(model)(x), model(x), rtol=1e-5, atol=1e-5)


def test_without_inputs_it_is_refused_by_name_or_left_out(base):
    told = {one.path: one.how for one in coverage(base).weights}
    assert "known only by a call with inputs" in told["body/down"]
    with pytest.raises(TypeError, match=r"linen module .*as example=(.|\n)*\n  body/down "):
        apply_dora(base, RULE, rngs=nnx.Rngs(1))
    with pytest.raises(TypeError, match=r"body/down .*: a linen module's, known only by a call"):
        apply_dora(base, DoRARule("body/down", 2, 3), rngs=nnx.Rngs(1))
    rule = DoRARule("all-linear", 2, 3, exclude="body.*")
    assert list(jax_dora.norms(apply_dora(base, rule, rngs=nnx.Rngs(1)))) == ["out"]


def test_a_name_that_a_dict_needs_is_refused():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Sequential([nn.Dense(WIDTH, name="items")])(x)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(Named(name="named")(x))

    base = nnx.bridge.ToNNX(Outer(), rngs=nnx.Rngs(0)).lazy_init(x)
    with pytest.raises(TypeError, match=r"named/items/kernel .*whose name nnx\.Dict needs: rename"):
        apply_dora(base, RULE, rngs=nnx.Rngs(1), example=(x,))
    rule = DoRARule("all-linear", 2, 3, exclude="named/.*")
    model = apply_dora(base, rule, rngs=nnx.Rngs(1), example=(x,))
    assert (model(x) == base(x)).all()


@pytest.mark.parametrize("is_layer", [True, False])
def test_adapters_of_a_linen_model_are_refused_by_every_function(base, is_layer):
    """Their arrays are no LoRAParams: a function would see none of them, or a part of a model's."""
    body = nn.Dense(WIDTH) if is_layer else Body()
    adapted = jax_dora.linen.apply_dora(body, RULE if not is_layer else DoRARule("", 2, 3))
    model = Model(nnx.Rngs(0), adapted)
    assert model(x).shape == (4, 5)
    for function in (
        jax_dora.norms,
        jax_dora.reset_magnitudes,
        jax_dora.freeze,
        jax_dora.get_adapter,
        merge_dora,
        remove_dora,
        lambda model: save_adapter(model, "unused"),
        lambda model: apply_dora(model, DoRARule("out", 2, 3), rngs=nnx.Rngs(1)),
    ):
        with pytest.raises(NotImplementedError, match=r"(.|\n)*pass inputs(.|\n)*\n  body"):
            function(model)
    told = {one.path: one.status for one in coverage(model).weights}
    assert told["body/kernel" if is_layer else "body/down/kernel"] == "adapted"
