"""Damaged folders: a clear error and an untouched model, or everything in the file in its place."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from torch import nn

import torch_dora
from tests.dora_common.peft.damage import damage
from torch_dora.peft import load_adapter, save_adapter

MUTATIONS = (60, pytest.param(2000, marks=pytest.mark.slow))
SELECTING = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform")
PLACES = {
    "first.lora_A.weight": "first.lora_a",
    "first.lora_B.weight": "first.lora_b",
    "first.lora_magnitude_vector": "first.magnitude",
    "middle.lora_embedding_A": "middle.lora_a",
    "middle.lora_embedding_B": "middle.lora_b",
    "middle.lora_magnitude_vector": "middle.magnitude",
    "last.weight": "last.weight",
    "last.bias": "last.bias",
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.middle = nn.Embedding(4, 3)
        self.last = nn.Linear(2, 2)


def adapted() -> Model:
    rule = torch_dora.DoRARule("first|middle", rank=2, alpha=3)
    return torch_dora.apply_dora(Model(), rule)


def snapshot(model: nn.Module) -> dict[str, tuple[object, ...]]:
    modules = [(name, id(module)) for name, module in model.named_modules()]
    return {
        name: (id(p), p.requires_grad, p.detach().numpy().tobytes(), modules)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("mutations", MUTATIONS)
def test_damaged_folders(mutations: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, folder = tmp_path / "whole", tmp_path / "damaged"
    save_adapter(adapted(), whole, modules_to_save=["last"])
    chance = random.Random(1)
    refused = 0

    for number in range(mutations):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        told = f"mutation {number}: {damage(folder, chance)}"
        model = adapted() if number % 2 else Model()
        before = snapshot(model)
        try:
            loaded = load_adapter(model, folder)
        except (ValueError, TypeError, NotImplementedError, FileNotFoundError) as error:
            message = str(error)
            refused += 1
            unchanged = snapshot(model) == before
        else:
            message, unchanged = None, True
            assert_all_is_there(loaded, folder, told)
        assert unchanged, told
        assert message is None or str(folder) in message, told

    assert mutations / 2 < refused < mutations * 0.95


def assert_all_is_there(loaded: Model, folder: Path, told: str) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    theirs = LoraConfig(**{name: config.get(name) for name in SELECTING if name in config})
    state = loaded.state_dict()
    assert sorted(state) == sorted(
        {*PLACES.values(), "first.weight", "first.bias", "middle.weight"}
    )
    for name in ("first", "middle"):
        layer = loaded.get_submodule(name)
        assert theirs.target_modules is None or check_target_module_exists(theirs, name), told
        assert isinstance(layer, torch_dora.DoRALinear | torch_dora.DoRAEmbedding)
        root = math.sqrt if config.get("use_rslora") else float
        alphas = config.get("alpha_pattern") or {}
        expected = alphas.get(name, config.get("lora_alpha", 8)) / root(layer.rank)
        assert layer.scale == pytest.approx(expected), told
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        short = key.removeprefix("base_model.model.").replace(".default", "")
        value = state[PLACES[short.replace("base_layer.", "")]]
        expected = tensor.to(value.dtype)
        assert value.shape == expected.shape, told
        assert value.numpy().tobytes() == expected.numpy().tobytes(), told
