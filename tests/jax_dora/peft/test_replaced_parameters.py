"""What a PEFT folder has replaced in a Flax model is told when another adapter takes its place."""

import ast
from pathlib import Path
from typing import Any

import pytest
import transformers

from jax_dora import get_adapter, remove_dora, set_adapter
from jax_dora.lm import models
from jax_dora.peft import load_adapter, save_adapter
from tests.jax_dora.peft.peft_folders import peft_model
from tests.torch_dora.peft_folders import SIZES
from tests.torch_dora.test_replaced_parameters import CASES

TOLD = "values of an earlier folder"


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES)
def test_what_an_earlier_folder_replaced_is_told(case: str, tmp_path: Path, caplog: Any) -> None:
    first, second, kept = CASES[case]
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    model.save_pretrained(tmp_path / "base")
    folders = []
    for name, fields in (("one", first), ("two", second)):
        theirs = peft_model(model, r=2, use_dora=True, target_modules=["q_proj"], **fields)
        theirs.save_pretrained(tmp_path / name, save_embedding_layers=False)
        model = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "base")
        folders.append(tmp_path / name)
    one, two = folders
    base = models.load_model(tmp_path / "base")
    loaded = load_adapter(load_adapter(base, one), one)
    assert TOLD not in caplog.text

    other = load_adapter(loaded, two)

    told = [text for text in caplog.messages if TOLD in text]
    assert len(told) == bool(kept)
    for text in told:
        assert text.startswith(f"after {two}, these parameters")
        assert text.splitlines()[1:] == [f"  {name}, from {one}" for name in kept]
    caplog.clear()
    remove_dora(other)
    assert caplog.text.count("without its adapters, these parameters") == 1
    caplog.clear()
    adapter = get_adapter(other)
    assert caplog.text.count("get_adapter leaves out these parameters") == 1
    set_adapter(other, adapter)
    assert caplog.text.count("after set_adapter, these parameters") == 1
    caplog.clear()
    set_adapter(base, adapter)
    assert not caplog.text


def test_both_tied_modules_are_named(tmp_path: Path, caplog: Any) -> None:
    config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)
    model = transformers.Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    theirs = peft_model(
        model,
        r=2,
        use_dora=True,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    )
    theirs.save_pretrained(tmp_path / "one", save_embedding_layers=False)
    loaded = load_adapter(models.load_model(tmp_path / "base"), tmp_path / "one")
    (text,) = caplog.messages
    modules = ast.literal_eval(text.partition("modules_to_save=")[2])
    assert {"embed_tokens", "lm_head"} <= set(modules)
    save_adapter(loaded, tmp_path / "again", modules_to_save=modules)
    caplog.clear()
    remove_dora(loaded)
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    assert caplog.messages[-1].splitlines()[1:] == [
        f"  {name}, from {tmp_path / 'one'}" for name in names
    ]
