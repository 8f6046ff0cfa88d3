"""Damaged folders: a clear error and an untouched model, or everything in the file in its place."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jax_dora
from jax_dora.peft import load_adapter, save_adapter
from tests.dora_common.peft.damage import damage

MUTATIONS = (60, pytest.param(2000, marks=pytest.mark.slow))
PLAIN_EVERY = 8
PLACES = {
    "first.lora_A.weight": ("first", "lora_a"),
    "first.lora_B.weight": ("first", "lora_b"),
    "first.lora_magnitude_vector": ("first", "magnitude"),
    "middle.lora_embedding_A": ("middle", "lora_a"),
    "middle.lora_embedding_B": ("middle", "lora_b"),
    "middle.lora_magnitude_vector": ("middle", "magnitude"),
    "last.weight": ("last", "kernel"),
    "last.bias": ("last", "bias"),
}


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 2, rngs=rngs)
        self.middle = nnx.Embed(4, 3, rngs=rngs)
        self.last = nnx.Linear(2, 2, rngs=rngs)


@pytest.fixture(scope="module")
def adapted() -> Model:
    rule = jax_dora.DoRARule("first|middle", rank=2, alpha=3)
    return jax_dora.apply_dora(Model(), rule, rngs=nnx.Rngs(1))


def values(model: nnx.Module) -> dict[Any, bytes]:
    return {
        path: np.asarray(leaf[...]).tobytes()
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


@pytest.mark.parametrize("mutations", MUTATIONS)
def test_damaged_folders(mutations: int, adapted: Model, tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "damaged"
    save_adapter(adapted, whole, modules_to_save=["last"])
    plain = Model()
    before = {id(model): values(model) for model in (plain, adapted)}
    chance = random.Random(0)
    refused = 0

    for number in range(mutations):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        told = f"mutation {number}: {damage(folder, chance)}"
        # Making an adapter anew takes JAX a while, filling one does not.
        model = plain if number % PLAIN_EVERY == 0 else adapted
        try:
            loaded = load_adapter(model, folder)
        except (ValueError, TypeError, NotImplementedError, FileNotFoundError) as error:
            message = str(error)
            refused += 1
        else:
            message = None
            assert_all_is_there(loaded, folder, told)
        assert message is None or str(folder) in message, told
        assert values(model) == before[id(model)], told

    assert mutations / 2 < refused < mutations * 0.95


def assert_all_is_there(loaded: Model, folder: Path, told: str) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    names = ["first", "middle"]
    assert [n for n in names if hasattr(getattr(loaded, n), "lora_a")] == names, told
    for name in names:
        layer = getattr(loaded, name)
        root = math.sqrt if config.get("use_rslora") else float
        alphas = config.get("alpha_pattern") or {}
        expected = alphas.get(name, config.get("lora_alpha", 8)) / root(layer.rank)
        assert layer.scale == pytest.approx(expected), told
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        short = key.removeprefix("base_model.model.").replace(".default", "")
        short = short.replace("base_layer.", "")
        module, attribute = PLACES[short]
        value = np.asarray(getattr(getattr(loaded, module), attribute)[...])
        expected = (tensor.T if tensor.ndim == 2 else tensor).astype(value.dtype)
        assert value.shape == expected.shape, told
        assert value.tobytes() == expected.tobytes(), told
        assert value.dtype in (jnp.float32, jnp.float64), told
