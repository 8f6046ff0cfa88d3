"""From Flax's paths to PyTorch's names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora
from jax_dora.peft import Names, load_adapter, save_adapter
from jax_dora.peft.named_model import named_model


@pytest.mark.parametrize(
    ("names", "path", "index", "expected"),
    [
        (Names(), "model/layers/0/mlp", (), "model.layers.0.mlp"),
        (Names(), "model/layers/mlp", (3,), "model.layers.3.mlp"),
        (Names(), "layers/0/blocks/mlp", (2,), "layers.0.blocks.2.mlp"),
        (Names(), "layers/blocks/mlp", (1, 2), "layers.1.blocks.2.mlp"),
        (Names(stacks=["tower"]), "tower/layers/mlp", (1,), "tower.1.layers.mlp"),
        (Names(rules=[("^h/", "gpt/h/"), ("key$", "k")]), "h/attn/key", (4,), "gpt.h.4.attn.k"),
    ],
)
def test_a_path_becomes_a_name(
    names: Names, path: str, index: tuple[int, ...], expected: str
) -> None:
    assert names.module(path, index) == expected


def test_a_stack_of_another_name_asks_for_it() -> None:
    with pytest.raises(ValueError, match=r"pass names=Names\(stacks=\.\.\.\)"):
        Names().module("tower/mlp", (0,))


def test_parameters_have_pytorchs_names() -> None:
    names = Names(parameters={"kernel": "matrix"})
    assert [names.parameter(one) for one in ("kernel", "bias")] == ["matrix", "bias"]
    assert [Names().parameter(one) for one in ("kernel", "embedding", "scale", "bias", "mean")] == [
        "weight",
        "weight",
        "weight",
        "bias",
        "running_mean",
    ]


class Pair(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.mlp = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs))


def test_the_members_of_a_sequential_are_its_own() -> None:
    assert set(named_model(Pair(), Names()).layers) == {"mlp.0", "mlp.1"}


def test_a_weight_is_named_as_a_layer_in_its_place(registrations) -> None:
    class Projection(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((3, 4)))

    jax_dora.register(Projection, axes="io")
    view = named_model(nnx.Sequential(Projection(), nnx.Linear(4, 3, rngs=nnx.Rngs(0))), Names())
    assert set(view.layers) == {"0", "1"}
    assert set(view.parameters) == {"0.weight", "1.weight", "1.bias"}
    shared = Projection()
    view = named_model(nnx.Dict(one=shared, other=shared), Names())
    assert set(view.layers) == {"one"}
    assert {name: one.shape for name, one in view.parameters.items()} == {
        "one.weight": (4, 3),
        "other.weight": (4, 3),
    }


def test_two_modules_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two modules 'mlp'"):
        named_model(Pair(), Names(rules=[(r"mlp/\d", "mlp")]))


def test_names_may_be_computed(tmp_path) -> None:
    class Backwards(Names):
        def module(self, path: str, index: tuple[int, ...] = ()) -> str:
            return super().module(path, index)[::-1]

    model = jax_dora.apply_dora(Pair(), jax_dora.DoRARule(".*", rank=2, alpha=2), rngs=nnx.Rngs(0))
    save_adapter(model, tmp_path / "a", names=Backwards(), fan_in_fan_out=True)

    config = jax_dora.peft.AdapterConfig.from_json(
        (tmp_path / "a" / "adapter_config.json").read_text()
    )
    assert config.target_modules == ("0.plm", "1.plm")
    assert config.fan_in_fan_out
    again = load_adapter(Pair(), tmp_path / "a", names=Backwards())
    ours, theirs = (nnx.state(one, nnx.LoRAParam) for one in (again, model))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
    with pytest.raises(ValueError, match=r"the nearest are mlp\."):
        load_adapter(Pair(), tmp_path / "a")
    with pytest.raises(ValueError, match="config gives"):
        save_adapter(
            jax_dora.apply_dora(Pair(), jax_dora.DoRARule(".*", rank=2, alpha=3), rngs=nnx.Rngs(0)),
            tmp_path / "b",
            names=Backwards(),
            config=config,
        )


@pytest.mark.parametrize("rules", [["^a"], [("^a", "b", "c")], [("^a", 1)]])
def test_rules_are_pairs(rules) -> None:
    with pytest.raises(TypeError, match="expected pairs of a regular expression and its replace"):
        Names(rules=rules)
    with pytest.raises(ValueError, match=r"rules has '\('; expected a regular expression"):
        Names(rules=[("(", "a")])


def test_names_of_another_type_are_refused(tmp_path) -> None:
    model = jax_dora.apply_dora(Pair(), jax_dora.DoRARule(".*", rank=2, alpha=2), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"names is a dict; expected jax_dora\.peft\.Names"):
        jax_dora.peft.save_adapter(model, tmp_path, names={"a": "b"})  # pyright: ignore
