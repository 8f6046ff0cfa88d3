"""Packed experts and other weights of a user's own classes, in PEFT's folders."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

import jax_dora
import torch_dora
from jax_dora import DoRARule, apply_dora, get_adapter, remove_dora
from jax_dora.peft import Names, load_adapter, save_adapter
from jax_dora.peft.named_model import named_model
from tests.jax_dora.small_models import train
from tests.tables import thinned

EXPERTS, WIDTH, HIDDEN, RANK = 3, 4, 5, 2
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class TorchExperts(torch.nn.Module):
    """As in transformers: each parameter is [experts, out, in]."""

    is_transposed = False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.einsum("td,efd->etf", x, self.gate_up_proj))
        return torch.einsum("etf,edf->td", hidden, self.down_proj)


class TorchModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.o_proj = torch.nn.Linear(2 * HIDDEN, WIDTH, bias=False)
        self.experts = TorchExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.o_proj(torch.tanh(self.q_proj(x))))


class Einsum(nnx.Module):
    def __init__(self, equation: str, shape: tuple[int, ...]) -> None:
        self.equation = equation
        self.w = nnx.Param(jnp.zeros(shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.equation, x, self.w[...])


class Experts(nnx.Module):
    def __init__(self) -> None:
        self.gate_up_proj = nnx.Param(jnp.zeros((EXPERTS, WIDTH, HIDDEN)))
        self.down_proj = nnx.Param(jnp.zeros((EXPERTS, HIDDEN, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(jnp.einsum("td,edf->etf", x, self.gate_up_proj[...]))
        return jnp.einsum("etf,efd->td", hidden, self.down_proj[...])


class Model(nnx.Module):
    def __init__(self, torch_model: TorchModel) -> None:
        self.q_proj = Einsum("td,dnh->tnh", (WIDTH, 2, HIDDEN))
        self.o_proj = Einsum("tnh,nhd->td", (2, HIDDEN, WIDTH))
        self.experts = Experts()
        weights = {name: one.detach().numpy() for name, one in torch_model.named_parameters()}
        self.q_proj.w[...] = weights["q_proj.weight"].T.reshape(WIDTH, 2, HIDDEN)
        self.o_proj.w[...] = weights["o_proj.weight"].T.reshape(2, HIDDEN, WIDTH)
        for name in ("gate_up_proj", "down_proj"):
            value = weights[f"experts.{name}"].transpose(0, 2, 1)
            getattr(self.experts, name)[...] = value

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.experts(self.o_proj(jnp.tanh(self.q_proj(x))))


@pytest.fixture(autouse=True)
def _registered(registrations):
    jax_dora.register(Einsum, axes=lambda module: jax_dora.einsum_axes(module.equation))
    for name in ("gate_up_proj", "down_proj"):
        jax_dora.register(Experts, param=name, axes="bio")


@pytest.fixture
def torch_model() -> TorchModel:
    torch.manual_seed(0)
    return TorchModel()


X = np.random.default_rng(2).standard_normal((6, WIDTH), np.float32)


def with_peft(model: TorchModel, **options) -> peft.PeftModel:
    options = {"target_modules": ["q_proj", "o_proj"], "target_parameters": TARGETS} | options
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=3, **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.5)
    return adapted.eval()


def compare(torch_model, model) -> None:
    with torch.no_grad():
        expected = torch_model(torch.tensor(X)).numpy()
    found = np.asarray(model(jnp.asarray(X)))
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


def adapted_by_hand(base: Model, **options) -> Model:
    rule = DoRARule(".*", RANK, 3, lora_b_init=nnx.initializers.normal(0.5), **options)
    return apply_dora(base, rule, rngs=nnx.Rngs(1))


@pytest.mark.slow
@pytest.mark.parametrize("targets", thinned([TARGETS, TARGETS[:1], ["down_proj"]], [TARGETS]))
def test_what_peft_saved_is_loaded(torch_model, tmp_path, targets):
    base = Model(torch_model)
    theirs = with_peft(torch_model, target_parameters=targets)
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(base, tmp_path)
    assert set(get_adapter(ours).arrays) == {"q_proj", "o_proj"} | {
        f"experts/{name.rpartition('.')[2]}" for name in targets
    }
    compare(theirs, ours)
    save_adapter(ours, tmp_path / "again", use_dora=False)
    one, other = (
        load_file(f / "adapter_model.safetensors") for f in (tmp_path, tmp_path / "again")
    )
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_peft_loads_what_is_saved(torch_model, tmp_path):
    ours = adapted_by_hand(Model(torch_model))
    save_adapter(ours, tmp_path, use_dora=False)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_parameters"] == sorted(TARGETS)
    assert config["target_modules"] == ["o_proj", "q_proj"]
    compare(peft.PeftModel.from_pretrained(torch_model, tmp_path), ours)


@pytest.mark.ci
def test_experts_alone(torch_model, tmp_path):
    rule = DoRARule("experts/down_proj", RANK, 3, lora_b_init=nnx.initializers.normal(0.5))
    ours = apply_dora(Model(torch_model), rule, rngs=nnx.Rngs(1))
    save_adapter(ours, tmp_path, use_dora=False)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == []
    compare(peft.PeftModel.from_pretrained(torch_model, tmp_path), ours)


class Scaled(nnx.Module):
    """A class of a user's own, with a bias, and a module that has parameters alone."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        self.bias = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x @ self.w[...] + self.bias[...][None])


class Stacked(nnx.Module):
    def __init__(self) -> None:
        make = nnx.split_rngs(splits=3)(nnx.vmap(Scaled, out_axes=0))
        self.layers = make(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.layers)


@pytest.mark.ci
def test_what_lies_beside_a_stacked_weight_is_told_apart_by_layers(tmp_path):
    jax_dora.register(Scaled, param="w", axes="io")
    base = Stacked()
    ours = train(apply_dora(base, DoRARule("layers", RANK, 3), rngs=nnx.Rngs(1)))
    ours.layers.bias[...] += 1
    save_adapter(ours, tmp_path, bias="all", modules_to_save=["norm"])
    found = load_file(tmp_path / "adapter_model.safetensors")
    for index in range(3):
        name = f"base_model.model.layers.{index}"
        assert np.array_equal(found.pop(f"{name}.base_layer.bias"), ours.layers.bias[index])
        assert np.array_equal(found.pop(f"{name}.norm.weight"), ours.layers.norm.scale[index])
        for one in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"):
            found.pop(f"{name}.{one}")
    assert not found
    again = load_adapter(base, tmp_path)
    assert jnp.array_equal(again(X), ours(X))
    view = named_model(base, Names())
    assert {name: one.shape for name, one in view.parameters.items()} == {
        f"layers.{index}.{name}": shape
        for index in range(3)
        for name, shape in [
            ("weight", (WIDTH, WIDTH)),
            ("bias", (WIDTH,)),
            ("norm.weight", (WIDTH,)),
        ]
    }


class TestDoRA:
    """Of packed experts, which PEFT has not."""

    @pytest.mark.ci
    def test_it_is_refused_unless_asked_for(self, torch_model, tmp_path):
        ours = train(adapted_by_hand(Model(torch_model)))
        match = r"use_dora=True for packed experts.*experts\.gate_up_proj.*for_peft=False"
        with pytest.raises(NotImplementedError, match=match):
            save_adapter(ours, tmp_path)
        with pytest.raises(ValueError, match="use_dora is False and the magnitude of"):
            save_adapter(ours, tmp_path, use_dora=False)
        save_adapter(ours, tmp_path, for_peft=False)
        with pytest.raises(ValueError, match="does not work with use_dora=True"):
            peft.PeftModel.from_pretrained(torch_model, tmp_path)
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        magnitude = tensors["base_model.model.experts.lora_magnitude_vector"]
        assert np.array_equal(magnitude, ours.experts.down_proj_magnitude[...])
        again = load_adapter(remove_dora(ours), tmp_path)
        for one, other in zip(
            *(jax.tree.leaves(get_adapter(model).arrays) for model in (ours, again)), strict=True
        ):
            assert jnp.array_equal(one, other)

    @pytest.mark.ci
    def test_torch_dora_reads_and_writes_it(self, torch_model, tmp_path):
        base = Model(torch_model)
        ours = train(adapted_by_hand(base))
        save_adapter(ours, tmp_path / "a", for_peft=False)
        theirs = torch_dora.peft.load_adapter(torch_model, tmp_path / "a")
        compare(theirs, ours)
        torch_dora.peft.save_adapter(theirs, tmp_path / "b", for_peft=False)
        one, other = (load_file(tmp_path / f / "adapter_model.safetensors") for f in "ab")
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)
        again = load_adapter(base, tmp_path / "b")
        assert jnp.array_equal(again(X), ours(X))

    def test_of_other_weights_is_pefts(self, torch_model, tmp_path):
        rule = DoRARule("._proj", RANK, 3, lora_b_init=nnx.initializers.normal(0.5))
        ours = train(apply_dora(Model(torch_model), rule, rngs=nnx.Rngs(1)))
        save_adapter(ours, tmp_path)
        compare(peft.PeftModel.from_pretrained(torch_model, tmp_path), ours)


class TestRefusals:
    def test_dropout(self, torch_model, tmp_path):
        ours = adapted_by_hand(Model(torch_model), dropout=0.5)
        with pytest.raises(NotImplementedError, match=r"PEFT refuses lora_dropout=0\.5"):
            save_adapter(ours, tmp_path, use_dora=False)

    def test_an_order_that_nothing_tells(self, torch_model, tmp_path):
        ours = adapted_by_hand(Model(torch_model))
        with pytest.raises(
            ValueError, match=r"experts has adapters of down_proj, gate_up.*Names\(exp"
        ):
            save_adapter(ours, tmp_path, use_dora=False, names=Names(experts=["a"]))

    def test_a_target_that_the_model_lacks(self, torch_model, tmp_path):
        base = Model(torch_model)
        with_peft(torch_model).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        config["target_parameters"].append("experts.w3")
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"experts\.w3, which target_parameters names, is no"):
            load_adapter(base, tmp_path)

    def test_features_that_an_old_peft_may_have_swapped(self, torch_model, tmp_path):
        base = Model(torch_model)
        base.experts.down_proj = nnx.Param(jnp.zeros((EXPERTS, HIDDEN, HIDDEN)))
        with_peft(torch_model, target_parameters=TARGETS[1:]).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        config["peft_version"] = "0.18.0"
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        name = "base_model.model.experts.lora_B.weight"
        tensors[name] = np.zeros((HIDDEN, RANK * EXPERTS), np.float32)
        save_file(tensors, tmp_path / "adapter_model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"features swapped: peft_version is 0\.18\.0"):
            load_adapter(base, tmp_path)
