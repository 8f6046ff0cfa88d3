"""`implementation="eager"`: JAX differentiates the definition itself, forwards too."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_dora import DoRARule, apply_dora, get_adapter, ops, set_adapter
from jax_dora.ops import Dropout
from parity.tolerances.caps import OPERATOR_FP32_MAX_ABS
from tests.jax_dora.small_models import ALL, Mixed, ids, train
from tests.jax_dora.tracing.own_layers import VOCABULARY, WIDTH, Einsum, Model
from tests.jax_dora.tracing.own_layers import ids as own_ids
from tests.tables import thinned


def eager(model):
    """The same model, whose layers JAX differentiates."""
    adapter = get_adapter(model)
    rules = tuple(dataclasses.replace(rule, implementation="eager") for rule in adapter.rules)
    return set_adapter(model, dataclasses.replace(adapter, rules=rules), rngs=nnx.Rngs(9))


class Small(nnx.Module):
    """A layer of each kind of operator, and a weight of a class of its own."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.own = Einsum("btd,df->btf", (WIDTH, WIDTH), rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.own(jnp.tanh(self.linear(self.embed(ids))))


def small():
    rule = DoRARule(".*", 2, 3)
    return apply_dora(Small(), rule, rngs=nnx.Rngs(1), example=(own_ids(),)), own_ids()


def mixed():
    return apply_dora(Mixed(nnx.Rngs(0)), ALL, rngs=nnx.Rngs(1)), ids()


def own():
    rules = [DoRARule("all-linear", 2, 3), DoRARule("embedder", 3, 5)]
    model = apply_dora(Model(nnx.Rngs(0)), rules, rngs=nnx.Rngs(1), example=(own_ids(),))
    return model, own_ids()


def directions(arrays, seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32)) / 10, arrays
    )


def dot(one, other) -> float:
    pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
    return float(sum(jnp.vdot(a, b) for a, b in pairs))


SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in (mixed, own)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [small, *SLOW])
def test_of_a_model(make):
    model, tokens = make()
    train(model)

    def loss_of(model):
        graphdef, adapter, rest = nnx.split(model, nnx.LoRAParam, ...)

        def loss(adapter):
            model = nnx.merge(graphdef, adapter, rest, copy=True)
            return sum(jnp.mean(jnp.sin(y)) for y in jax.tree.leaves(model(tokens)))

        return loss, adapter

    loss, adapter = loss_of(model)
    one, other = directions(adapter, 1), directions(adapter, 2)
    expected, gradient = jax.jit(jax.value_and_grad(loss))(adapter)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(loss, (adapter,), (one,))
    plain, adapter = loss_of(eager(model))

    @jax.jit
    def forward_over_reverse(direction):
        return jax.jvp(jax.value_and_grad(plain), (adapter,), (direction,))

    (value, _), (slope, product) = forward_over_reverse(one)
    assert abs(float(value - expected)) <= OPERATOR_FP32_MAX_ABS
    assert float(slope) == pytest.approx(dot(gradient, one), rel=1e-4)
    _, (_, crossed) = forward_over_reverse(other)
    # The Hessian is symmetric, and not zero.
    assert dot(product, other) == pytest.approx(dot(crossed, one), rel=1e-3, abs=1e-5)
    assert abs(dot(product, other)) > 1e-5


OPERANDS = {
    "x": (3, 5),
    "kernel": (5, 7),
    "lora_a": (5, 2),
    "lora_b": (2, 7),
    "magnitude": (7,),
    "bias": (7,),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", thinned(["adapter", "input"], ["input"]))
def test_of_the_operator(mode):
    rng = np.random.default_rng(0)
    given = {n: jnp.asarray(rng.standard_normal(s, np.float32)) for n, s in OPERANDS.items()}
    dropout = Dropout(jnp.array([1, 2], jnp.uint32), 0.4, mode)

    def of(implementation):
        options = {"scale": 0.7, "dropout": dropout, "implementation": implementation}
        return jax.jit(lambda given: ops.dora_linear(**given, **options))

    expected = jax.jacrev(of(None))(given)
    found = jax.jacfwd(of("eager"))(given)
    for name in OPERANDS:
        np.testing.assert_allclose(found[name], expected[name], 0, OPERATOR_FP32_MAX_ABS)
    assert jnp.array_equal(of("eager")(given), of("xla")(given))


@pytest.mark.ci
def test_what_is_not_differentiated_names_what_is():
    """By jax.jvp a layer's own call raises, and by jax.hessian the rule of a kernel."""
    model: Any = apply_dora(Mixed(nnx.Rngs(0)), ALL, rngs=nnx.Rngs(1))
    layer, width = model.blocks[0], model.conv.in_features
    for one in (layer, model.conv):
        x = jnp.ones((2, 5, width))
        with pytest.raises(TypeError, match=r"forward-mode.*pass implementation='eager'") as caught:
            jax.jvp(one, (x,), (x,))
        assert str(caught.value).count("DoRARules") == 1

    def hessian(implementation):
        layer.implementation = implementation
        return jax.hessian(lambda x: jnp.sum(jnp.sin(layer(x))))(jnp.linspace(-1, 1, width))

    with pytest.raises(NotImplementedError, match=r"jax\.hessian.*implementation='xla'.*'eager'"):
        hessian(None)
    expected = hessian("eager")
    np.testing.assert_allclose(hessian("xla"), expected, 0, OPERATOR_FP32_MAX_ABS)
    assert jnp.abs(expected).max() > 0.01


@pytest.mark.ci
def test_a_penalty_of_a_gradient():
    rng = np.random.default_rng(0)
    given = {n: jnp.asarray(rng.standard_normal(s, np.float32)) for n, s in OPERANDS.items()}

    def penalty(implementation):
        def loss(given):
            y = ops.dora_linear(**given, scale=0.7, implementation=implementation)
            return jnp.sum(jnp.sin(y))

        def squared(given):
            return sum(jnp.vdot(one, one) for one in jax.grad(loss)(given).values())

        return squared

    expected = jax.grad(penalty("eager"))(given)
    found = jax.grad(penalty("xla"))(given)
    for name in OPERANDS:
        peak = float(jnp.abs(expected[name]).max())
        np.testing.assert_allclose(found[name], expected[name], 0, OPERATOR_FP32_MAX_ABS * peak)
    with pytest.raises(NotImplementedError, match=r"gradient of a gradient.*implementation='xla'"):
        jax.grad(penalty(None))(given)


@pytest.mark.ci
def test_of_the_other_operators():
    rng = np.random.default_rng(0)
    base, lora = (jnp.asarray(rng.standard_normal((3, 7), np.float32)) for _ in range(2))
    g, other = (jnp.asarray(rng.standard_normal(7, np.float32)) for _ in range(2))
    calls = [
        lambda by, *a: ops.compose(*a, 0.7, implementation=by),
        lambda by, *a: ops.compose_delta(*a, 0.7, implementation=by),
        lambda by, *a: ops.swiglu(*a, other, implementation=by),
    ]
    for call in calls:
        arguments = ((base, lora, g), (0, 1, 2))
        found = jax.jacfwd(lambda *a, call=call: call("eager", *a), arguments[1])(*arguments[0])
        expected = jax.jacrev(lambda *a, call=call: call("xla", *a), arguments[1])(*arguments[0])
        for one, another in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, another, 0, OPERATOR_FP32_MAX_ABS)
