"""What a PEFT folder has replaced in the base model is told when another one does not."""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.torch_dora.peft_folders import IDS, base, llama, output, peft_folder
from torch_dora import remove_dora
from torch_dora.peft import load_adapter

READ, OTHER = int(IDS[0, 0]), int((IDS[0, 0] + 1) % 40)
BIASES = [f"model.layers.{at}.self_attn.q_proj.bias" for at in range(2)]
CASES = {
    "a module": (
        {"modules_to_save": ["1.input_layernorm"]},
        {},
        ["model.layers.1.input_layernorm.weight"],
    ),
    "biases": ({"bias": "lora_only"}, {}, BIASES),
    "a row": (
        {"trainable_token_indices": [READ, OTHER]},
        {"trainable_token_indices": [OTHER]},
        ["model.embed_tokens.weight"],
    ),
    "replaced rows": (
        {"trainable_token_indices": [7, 2]},
        {"trainable_token_indices": [2, 5, 7]},
        [],
    ),
    "replaced modules": (
        {"modules_to_save": ["norm"]},
        {"modules_to_save": ["norm", "lm_head"]},
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_an_earlier_folder_replaced_is_told(case: str, tmp_path: Path, caplog: Any) -> None:
    first, second, kept = CASES[case]
    one, _ = peft_folder(tmp_path / "one", llama, target_modules=["q_proj"], **first)
    two, theirs = peft_folder(tmp_path / "two", llama, target_modules=["q_proj"], **second)
    model = load_adapter(base(llama), one)
    model = copy.deepcopy(load_adapter(model, one))
    assert "earlier folder" not in caplog.text

    load_adapter(model, two)

    told = [text for text in caplog.messages if "values of an earlier folder" in text]
    assert len(told) == bool(kept)
    for text in told:
        assert text.startswith(f"after {two}, these parameters")
        assert text.splitlines()[1:] == [f"  {name}, from {one}" for name in kept]
    assert ((output(model) - output(theirs)).abs().max() > 1e-5) == bool(kept)
    caplog.clear()
    remove_dora(model)
    assert caplog.text.count("without its adapters, these parameters") == 1
