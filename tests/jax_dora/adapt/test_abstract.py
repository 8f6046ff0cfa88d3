"""Abstract models, from `nnx.eval_shape`: which functions accept them, and the errors of the
others."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import jax_dora
from jax_dora import DoRARule
from jax_dora.lm import models
from tests.jax_dora.lm.models.conftest import SMALL
from tests.jax_dora.small_models import Block, Stacked
from tests.tables import ci

RULE = DoRARule("all-linear", rank=2, alpha=3)


def plain() -> Block:
    return Block(nnx.Rngs(0))


def adapted() -> Block:
    return jax_dora.apply_dora(plain(), RULE, rngs=nnx.Rngs(1))


ABSTRACT, ABSTRACT_ADAPTED = nnx.eval_shape(plain), nnx.eval_shape(adapted)
ABSTRACT_ADAPTER = jax_dora.get_adapter(ABSTRACT_ADAPTED)


@pytest.mark.parametrize(
    ("function", "call", "path"),
    [
        ("norms", lambda: jax_dora.norms(ABSTRACT_ADAPTED), "heads/bias"),
        ("freeze", lambda: jax_dora.freeze(ABSTRACT_ADAPTED), "heads/bias"),
        ("merge_dora", lambda: jax_dora.merge_dora(ABSTRACT_ADAPTED), "heads/bias"),
        (
            "merge_dora",
            lambda: jax_dora.merge_dora(plain(), adapters=[ABSTRACT_ADAPTER]),
            "0/arrays/heads/lora_a",
        ),
        ("apply_dora", lambda: jax_dora.apply_dora(ABSTRACT, RULE, rngs=nnx.Rngs(0)), "heads/bias"),
        (
            "set_adapter",
            lambda: jax_dora.set_adapter(ABSTRACT, jax_dora.get_adapter(adapted())),
            "heads/bias",
        ),
        ("quantize", lambda: jax_dora.quantize(ABSTRACT, "int8"), "heads/bias"),
        (
            "with_norms",
            lambda: jax_dora.with_norms(adapted(), nnx.eval_shape(jax_dora.norms, adapted())),
            "heads",
        ),
        (
            "DoRALinear",
            lambda: jax_dora.DoRALinear.from_linear(
                ABSTRACT.linear, rank=2, alpha=3, rngs=nnx.Rngs(0)
            ),
            "bias",
        ),
    ],
)
def test_functions_that_read_values_name_a_parameter_and_the_fix(function, call, path):
    message = (
        f"is abstract: '{path}' is a ShapeDtypeStruct of shape .*; expected arrays, since "
        f"jax_dora.{function} reads their values: .* inside of nnx.eval_shape too"
    )
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("peft.save_adapter", lambda model: jax_dora.peft.save_adapter(model, "folder")),
        ("peft.load_adapter", lambda model: jax_dora.peft.load_adapter(model, "folder")),
        ("AdapterBank", lambda model: jax_dora.AdapterBank(model, 2, 4)),
        ("merge_dora", lambda model: jax_dora.merge_dora(model, return_report=True)),
    ],
)
def test_functions_that_cannot_be_traced_say_so(function, call):
    fix = re.escape(f"call jax_dora.{function}, outside of nnx.eval_shape and jit")
    with pytest.raises(ValueError, match=f"'heads/bias' is a ShapeDtypeStruct.*{fix}"):
        call(ABSTRACT_ADAPTED)
    with pytest.raises(ValueError, match=f"'heads/bias' is a .*Tracer.*{fix}"):
        nnx.eval_shape(call, adapted())


def test_a_bank_names_the_array_of_an_abstract_adapter():
    bank = jax_dora.AdapterBank(plain(), 2, 4)
    with pytest.raises(ValueError, match=r"adapter is abstract: 'heads/lora_a' is a Shape"):
        bank.load(0, ABSTRACT_ADAPTER)


def test_the_linen_merge_names_a_parameter():
    model = jax_dora.linen.apply_dora(linen.Dense(4), DoRARule("", 2, 3))
    x = jnp.ones((1, 4))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"'params/bias' is a Shape.*linen\.merge_dora reads"):
        jax_dora.linen.merge_dora(model, variables, x)


def test_a_decoder_is_neither_run_nor_saved(tmp_path):
    model = nnx.eval_shape(lambda: models.make_model(SMALL))
    with pytest.raises(ValueError, match=r"is abstract: .* jax_dora\.lm\.models\.generate reads"):
        models.generate(model, [[1]], 1)
    with pytest.raises(ValueError, match=r"is abstract: .* jax_dora\.lm\.models\.save_model reads"):
        models.save_model(model, tmp_path / "folder", {})


@pytest.mark.parametrize(
    "call",
    [
        ci(jax_dora.merge_dora),
        jax_dora.freeze,
        jax_dora.remove_dora,
        ci(lambda model: jax_dora.quantize(model, "int8")),
        lambda model: jax_dora.with_norms(model, jax_dora.norms(model)),
    ],
)
def test_shapes_are_computed_inside_of_eval_shape(call):
    for kind in (Block, Stacked):

        def make(kind=kind):
            return jax_dora.apply_dora(kind(nnx.Rngs(0)), RULE, rngs=nnx.Rngs(1))

        abstract, concrete = nnx.eval_shape(call, nnx.eval_shape(make)), call(make())
        assert nnx.graphdef(abstract) == nnx.graphdef(concrete)
        shapes = [jax.tree.map(jnp.shape, nnx.state(model)) for model in (abstract, concrete)]
        assert shapes[0] == shapes[1]


def test_functions_that_read_no_values_accept_an_abstract_model():
    assert {*jax_dora.coverage(ABSTRACT).weights} == {*jax_dora.coverage(plain()).weights}
    given = jax_dora.with_norms(ABSTRACT_ADAPTED, jax_dora.norms(adapted()))
    assert given.linear.given_norm.shape == (8,)
    bank = jax_dora.AdapterBank(plain(), 2, 4).load(1, jax_dora.get_adapter(adapted()))
    for model in (
        jax_dora.with_bank(ABSTRACT, bank, [1, -1]),
        nnx.eval_shape(lambda: jax_dora.with_bank(plain(), bank, [1, -1])),
    ):
        assert isinstance(model.linear.kernel.get_value(), jax.ShapeDtypeStruct)
