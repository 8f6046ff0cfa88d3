"""Real folders of the architectures that PEFT itself is tested with, both ways."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

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


@pytest.mark.parametrize("kind", [Gemma3TextScaledWordEmbedding, BartScaledWordEmbedding])
def test_a_folder_of_a_scaled_embedding(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(kind(40, 24, 0, embed_scale=24**0.5)).double()
    ids = torch.randint(0, 40, (2, 9))
    config = peft.LoraConfig(r=3, lora_alpha=5, use_dora=True, target_modules=["0"])
    theirs = perturbed(peft.get_peft_model(copy.deepcopy(plain), config))
    theirs.save_pretrained(tmp_path, save_embedding_layers=False)
    ours = load_adapter(copy.deepcopy(plain), tmp_path)
    expected, found = theirs(ids), ours(ids)
    assert (expected - plain(ids)).abs().max() > 1e-3
    assert (found - expected).abs().max() <= TOLERANCE
    cotangent = torch.randn_like(found)
    expected.backward(cotangent)
    found.backward(cotangent)
    peft_model: Any = theirs.base_model.model
    pairs = (
        (ours[0].lora_a, peft_model[0].lora_embedding_A["default"]),
        (ours[0].lora_b, peft_model[0].lora_embedding_B["default"]),
        (ours[0].magnitude, peft_model[0].lora_magnitude_vector["default"].weight),
    )
    for one, other in pairs:
        assert (one.grad - other.grad).abs().max() <= TOLERANCE
    merged = torch_dora.merge_dora(ours)[0]
    assert type(merged) is kind
    of_theirs: Any = theirs.merge_and_unload()
    assert (merged.weight - of_theirs[0].weight).abs().max() <= TOLERANCE
    fresh = torch_dora.apply_dora(plain.float(), torch_dora.DoRARule("0", rank=2, alpha=3))
    assert torch.equal(fresh(ids), fresh[0].base(ids))
