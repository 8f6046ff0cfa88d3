"""Damaged folders: refused by name with the model untouched, or read as PEFT reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torch_dora
from tests.dora_common.peft.mutations import IDS, REFUSALS, Model, fuzz, make_folder, stored
from torch_dora.peft import load_adapter

MUTATIONS = (40, pytest.param(2000, marks=pytest.mark.slow))


def snapshot(model: nn.Module) -> dict[str, tuple[object, ...]]:
    modules = [(name, id(module)) for name, module in model.named_modules()]
    return {
        name: (id(p), p.requires_grad, p.detach().numpy().tobytes(), modules)
        for name, p in model.named_parameters()
    }


def load(number: int, folder: Path, told: str) -> np.ndarray:
    model = Model()
    if number % 2:
        rule = torch_dora.DoRARule("first|middle", rank=2, alpha=3)
        model = torch_dora.apply_dora(model, rule)
    before = snapshot(model)
    try:
        loaded = load_adapter(model, folder)
    except REFUSALS:
        assert snapshot(model) == before, told
        raise
    for module, attribute, rows, tensor in stored(folder):
        value = getattr(loaded.get_submodule(module), attribute).detach().numpy()[rows]
        assert value.tobytes() == tensor.astype(value.dtype).tobytes(), told
    with torch.no_grad():
        return loaded.eval()(torch.from_numpy(IDS)).numpy()


@pytest.mark.parametrize("mutations", MUTATIONS)
def test_damaged_folders(mutations: int, tmp_path: Path) -> None:
    found = fuzz(tmp_path, mutations, 1, load)
    assert found["equal"] > mutations / 10, found
    assert found["refused"] > mutations / 3, found
    assert found["refused, not by PEFT"] < mutations / 4, found
    print(found)


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "last", "trainable_tokens"])
def test_what_a_dtype_cannot_hold_is_refused(part: str, tmp_path: Path) -> None:
    folder, model = make_folder(tmp_path, "tokens", **{part: 1e6}), Model().half()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"as torch\.float16, .* holds NaN or infinity") as refusal:
        load_adapter(model, folder, adapter_dtype=torch.float16)
    assert str(folder) in str(refusal.value)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["lora", "patterns"])
def test_a_folder_with_an_infinite_norm_is_refused(name: str, tmp_path: Path) -> None:
    folder, model = make_folder(tmp_path, name, lora_A=1e30), Model()
    before = snapshot(model)
    with pytest.raises(ValueError, match=rf"{name}: the norm of first .* holds NaN or infinity"):
        load_adapter(model, folder)
    assert snapshot(model) == before
