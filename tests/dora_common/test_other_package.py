"""What belongs to the other package is refused with its name."""

import pytest
import torch
from flax import nnx

import jax_dora
import torch_dora

LINEAR, FLAX = torch.nn.Linear(3, 4), nnx.Linear(3, 4, rngs=nnx.Rngs(0))


def in_jax(model, rules):
    return jax_dora.apply_dora(model, rules, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("apply", "model", "given", "expected"),
    [
        (in_jax, FLAX, "torch_dora", "jax_dora"),
        (torch_dora.apply_dora, LINEAR, "jax_dora", "torch_dora"),
    ],
)
def test_a_rule_of_the_other_package(apply, model, given, expected, many):
    rule = {"jax_dora": jax_dora, "torch_dora": torch_dora}[given].DoRARule(".*", 2, 4)
    rules, name = ([rule], r"rules\[0\]") if many else (rule, "rules")
    message = rf"{name} is a {given}\.DoRARule; expected a {expected}\.DoRARule"
    with pytest.raises(TypeError, match=message):
        apply(model, rules)


def test_a_torch_model_in_jax_dora():
    rule = jax_dora.DoRARule(".*", 2, 4)
    for call in (lambda one: in_jax(one, rule), jax_dora.norms, jax_dora.merge_dora):
        with pytest.raises(TypeError, match=r"is a Linear; expected an nnx\.Module: torch_dora "):
            call(LINEAR)


def test_a_flax_model_in_torch_dora():
    rule = torch_dora.DoRARule(".*", 2, 4)
    for call in (
        lambda one: torch_dora.apply_dora(one, rule),
        torch_dora.norms,
        torch_dora.coverage,
    ):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module: jax_dora "):
            call(FLAX)
