"""Damaged folders: refused by name with the model untouched, or read as PEFT reads them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_dora
from jax_dora.peft import load_adapter
from tests.dora_common.peft import mutations as damaged
from tests.dora_common.peft.mutations import IDS, REFUSALS, fuzz, make_folder, stored

MUTATIONS = (8, pytest.param(2000, marks=pytest.mark.slow))


class Model(nnx.Module):
    """`damaged.Model()` in Flax."""

    def __init__(self, dtype: Any = jnp.float32) -> None:
        options = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.first = nnx.Linear(3, 2, **options)
        self.middle = nnx.Embed(4, 3, **options)
        self.last = nnx.Linear(2, 2, **options)
        for name, parameter in damaged.Model().named_parameters():
            module, _, attribute = name.partition(".")
            layer, value = getattr(self, module), parameter.detach().numpy()
            flax_name = name_of(layer, attribute)
            getattr(layer, flax_name).set_value(jnp.asarray(as_flax(flax_name, value), dtype))

    def __call__(self, ids):
        return self.last(jnp.tanh(self.first(self.middle(ids))))


def name_of(layer: nnx.Module, attribute: str) -> str:
    if attribute != "weight":
        return attribute
    return "embedding" if hasattr(layer, "embedding") else "kernel"


def as_flax(name: str, value: np.ndarray) -> np.ndarray:
    return value.T if name in ("kernel", "lora_a", "lora_b") else value


def values(model: nnx.Module) -> dict[Any, bytes]:
    return {
        path: np.asarray(leaf[...]).tobytes()
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


@pytest.mark.parametrize("mutations", MUTATIONS)
def test_damaged_folders(mutations: int, tmp_path: Path) -> None:
    plain, rule = Model(), jax_dora.DoRARule("first|middle", rank=2, alpha=3)
    models = (plain, jax_dora.apply_dora(plain, rule, rngs=nnx.Rngs(1)))
    before = [values(model) for model in models]

    def load(number: int, folder: Path, told: str) -> np.ndarray:
        try:
            loaded = load_adapter(models[number % 2], folder)
        except REFUSALS:
            assert values(models[number % 2]) == before[number % 2], told
            raise
        for module, attribute, rows, tensor in stored(folder):
            layer = getattr(loaded, module)
            name = name_of(layer, attribute)
            value = as_flax(name, np.asarray(getattr(layer, name)[...]))[rows]
            assert value.tobytes() == tensor.astype(value.dtype).tobytes(), told
        return np.asarray(loaded(jnp.asarray(IDS)))

    found = fuzz(tmp_path, mutations, 0, load)
    assert [values(model) for model in models] == before
    assert found["equal"] > mutations / 10, found
    assert found["refused"] > mutations / 4, found
    assert found["refused, not by PEFT"] < mutations / 4, found
    print(found)


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "last", "trainable_tokens"])
def test_what_a_dtype_cannot_hold_is_refused(part: str, tmp_path: Path) -> None:
    folder, model = make_folder(tmp_path, "tokens", **{part: 1e6}), Model(jnp.float16)
    with pytest.raises(ValueError, match=r"as float16, .* holds NaN or infinity") as refusal:
        load_adapter(model, folder, adapter_dtype=jnp.float16)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize("name", ["lora", "patterns"])
def test_a_folder_with_an_infinite_norm_is_refused(name: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, name, lora_A=1e30)
    with pytest.raises(ValueError, match=rf"{name}: the norm of first .* holds NaN or infinity"):
        load_adapter(Model(), folder)
