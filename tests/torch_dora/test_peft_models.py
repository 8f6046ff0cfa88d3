"""Real folders of the architectures that PEFT itself is tested with, both ways."""

from pathlib import Path

import peft
import pytest
import torch
from torch import nn

import torch_dora
from tests.tables import thinned
from tests.torch_dora.architectures import MODELS, base, output
from tests.torch_dora.peft_folders import assert_same, perturbed, tensors_of
from torch_dora.peft import load_adapter, save_adapter

TOLERANCE = 1e-6
# Projections in rotary attention, Conv1D, an encoder with a decoder, packed experts.
QUICK = ["Qwen3", "GPT-2", "T5", "Mixtral"]


@pytest.mark.parametrize("name", thinned(MODELS, QUICK))
def test_a_folder_of_an_architecture(name: str, tmp_path: Path) -> None:
    make, inputs, targets, fields = MODELS[name]
    config = peft.LoraConfig(r=3, lora_alpha=5, use_dora=True, target_modules=targets, **fields)
    theirs = perturbed(peft.get_peft_model(base(make), config)).eval()
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    expected = output(theirs, inputs)
    assert (output(base(make), inputs) - expected).abs().max() > 1e-3

    ours = load_adapter(base(make), tmp_path / "theirs")

    assert (output(ours, inputs) - expected).abs().max() <= TOLERANCE
    options = {name: fields[name] for name in fields if name != "fan_in_fan_out"}
    save_adapter(ours, tmp_path / "ours", **options)
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    again = peft.PeftModel.from_pretrained(base(make), tmp_path / "ours")
    assert (output(again, inputs) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", thinned(MODELS, QUICK))
def test_peft_computes_what_a_model_adapted_here_does(name: str, tmp_path: Path) -> None:
    make, inputs, _, _ = MODELS[name]
    model = base(make)
    linear = [
        name
        for name, one in model.named_modules()
        if isinstance(one, nn.Linear) and "." in name and "layers.1" not in name
    ] or [f"transformer.h.{block}.attn.c_attn" for block in (0, 1)]
    rule = torch_dora.DoRARule("|".join(linear), rank=2, alpha=3, adapter_dtype=torch.float64)
    save_adapter(perturbed(torch_dora.apply_dora(model, rule)), tmp_path / "adapter")

    theirs = peft.PeftModel.from_pretrained(base(make), tmp_path / "adapter")

    assert (output(theirs, inputs) - output(model, inputs)).abs().max() <= TOLERANCE
    assert (output(theirs, inputs) - output(base(make), inputs)).abs().max() > 1e-3
