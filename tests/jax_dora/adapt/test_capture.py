"""`nnx.capture` records the results of adapted layers as it does those of the base layers."""

import chex
import jax
import pytest
from flax import nnx

import jax_dora
from jax_dora import DoRARule, apply_dora
from tests.jax_dora.bank.adapters import drawn
from tests.jax_dora.small_models import ALL, WIDTH, Mixed, ids, train


def captured(model, *inputs):
    """Returns the model's result, and the results of its methods."""
    for _, module in nnx.iter_modules(model):
        # `nnx.tabulate` leaves inherited methods in a class, of which `nnx.capture` wraps its own.
        if "sow" in vars(type(module)):
            del type(module).sow
    return nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(*inputs)


def test_every_layer_of_a_fresh_adapter_is_recorded():
    base = Mixed(nnx.Rngs(0))
    adapted = apply_dora(base, ALL, rngs=nnx.Rngs(1))
    chex.assert_trees_all_close(captured(adapted, ids()), captured(base, ids()), atol=1e-5)


@pytest.mark.parametrize("change", [train, jax_dora.freeze])
def test_results_stay_those_of_the_model(change):
    base = nnx.Sequential(
        nnx.ConvTranspose(WIDTH, WIDTH, (3,), rngs=nnx.Rngs(0)),
        nnx.LinearGeneral(WIDTH, (2, 3), rngs=nnx.Rngs(1)),
    )
    model = change(apply_dora(base, DoRARule(".*", 2, 3.0), rngs=nnx.Rngs(2)))
    x = jax.random.normal(jax.random.key(0), (2, 5, WIDTH))
    y, recorded = captured(model, x)
    chex.assert_trees_all_equal(y, model(x), recorded["layers"][1]["__call__"][0])


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.last = nnx.LinearGeneral(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(sum(jax_dora.apply_layers(self.layers, x)))


def test_rows_with_adapters_of_a_bank():
    base = Pair(nnx.Rngs(0))
    bank = jax_dora.AdapterBank(base, 2, 4)
    bank = bank.load(0, drawn(bank, {"layers/0": 2, "layers/1": 3, "last": 2}))
    model = jax_dora.with_bank(base, bank, [0, -1, 0])
    x = jax.random.normal(jax.random.key(0), (3, 1, WIDTH))
    y, recorded = captured(model, x)
    chex.assert_trees_all_equal(y, model(x), recorded["last"]["__call__"][0])
