"""What several layers do together is what each of them does alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora
from jax_dora.bank import bank_layers
from jax_dora.ops import RESULT_NAME
from parity import tolerances
from tests.jax_dora.bank.adapters import drawn

FP8 = "float8_e4m3fn"


class Pair(nnx.Module):
    def __init__(self, **options):
        self.first = nnx.Linear(32, 48, rngs=nnx.Rngs(0), **options)
        self.second = nnx.Linear(32, 16, rngs=nnx.Rngs(1), **options)

    @property
    def layers(self):
        return [self.first, self.second]

    def __call__(self, x):
        return jax_dora.apply_layers(self.layers, x)


def adapted(pair):
    rule = jax_dora.DoRARule("first|second", rank=2, alpha=3)
    return jax_dora.apply_dora(pair, rule, rngs=nnx.Rngs(2))


def in_bank(pair):
    bank = jax_dora.AdapterBank(pair, 2, 4)
    bank = bank.load(0, drawn(bank, {"first": 2, "second": 3}))
    return jax_dora.with_bank(pair, bank, [0, -1, 0])


def rows(*shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(3), shape, dtype)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("change", [lambda pair: pair, adapted, in_bank])
def test_results_are_those_of_each_layer(change, tokens):
    pair, x = change(Pair()), rows(3, tokens, 32)
    for found, layer in zip(pair(x), pair.layers, strict=True):
        expected = np.asarray(layer(x))
        peak = np.abs(expected).max()
        assert np.abs(found - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS * peak


@pytest.mark.parametrize("change", [lambda pair: pair, in_bank])
def test_results_of_layers_that_do_not_name_them_are_named(change):
    graphdef, state = nnx.split(change(Pair()))
    program = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, rows(3, 1, 32))
    assert str(program).count(RESULT_NAME) == 2


@pytest.mark.parametrize(("name", "tokens"), [("bank_linears", 1), ("bank_projections", 5)])
def test_layers_of_a_bank_are_one_call_of_its_kernels(name, tokens, monkeypatch):
    called, original = [], getattr(bank_layers, name)

    def spy(x, projections, *others, **options):
        called.append(len(projections))
        return original(x, projections, *others, **options)

    monkeypatch.setattr(bank_layers, name, spy)
    in_bank(Pair())(rows(3, tokens, 32))
    assert called == [2]


@pytest.mark.ci
def test_codes_are_made_once_and_are_those_that_each_layer_makes():
    pair = jax_dora.quantize(Pair(dtype=jnp.bfloat16), FP8, path=".*", act_qtype=FP8)
    x = rows(4, 32, dtype=jnp.bfloat16)
    plain = jax_dora.layer_inputs([*pair.layers, Pair().first], x)
    assert plain is x
    known = jnp.abs(x).max(axis=-1).astype(jnp.float32)
    for largest in (None, lambda: known, lambda: (x, known)):
        inputs = jax_dora.layer_inputs(pair.layers, x, largest)
        first, *codes = jax.tree.leaves(inputs)
        assert first is x
        assert codes[0].dtype == FP8
        for found, layer in zip(
            jax_dora.apply_layers(pair.layers, inputs), pair.layers, strict=True
        ):
            np.testing.assert_array_equal(found, layer(x))
