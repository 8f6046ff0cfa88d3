"""A tokenizer and a chat template beside an adapter, held to transformers with the adapter's folder
where it has one of its own, and with the model's folder elsewhere."""

import argparse
import json
import shutil

import pytest
import transformers

from jax_dora.lm.commands import generate, main
from jax_dora.lm.commands.folders import text_settings
from jax_dora.lm.models import DecoderConfig, make_model, read_config, save_model
from jax_dora.lm.models.tokenizer import TextSettings
from tests.jax_dora.lm import chatml
from tests.jax_dora.lm.chatml import CONFIG, write_text_files

TALK = [{"role": "user", "content": "a<x>b"}]
OTHER = (
    "{% for m in messages %}{{ bos_token }}<{{ m.role }}>{{ m.content + eos_token }}{% endfor %}"
)
TOKEN = {"additional_special_tokens": ["<x>"]}
ADDED = {"259": {"content": "<x>", "special": True}}
# What the folders of the model and of the adapter have, and what of it the adapter has of its own.
CASES = {
    "the same": ({}, {}, ""),
    "the same, and padding": ({}, {"pad_token": "<|im_end|>"}, ""),
    "a template": ({}, {"template": OTHER}, "chat template"),
    "a template in another file": ({}, {"file": OTHER}, "chat template"),
    "a template over one in another file": ({"file": OTHER}, {"template": chatml.TEMPLATE}, None),
    "a template beside templates for tools": (
        {"tools": OTHER},
        {"template": OTHER},
        "chat template",
    ),
    "a template that the model does not have": (
        {"template": None},
        {"template": OTHER},
        "chat template",
    ),
    "a template with another end": (
        {"template": OTHER},
        {"template": OTHER, "eos_token": "<|im_end|>"},
        "chat template",
    ),
    "a tokenizer": ({}, TOKEN, "tokenizer"),
    "a tokenizer in place of one with more": (TOKEN, {}, "tokenizer"),
    "both": ({}, TOKEN | {"template": OTHER}, "tokenizer and chat template"),
}


def write(folder, *, file=None, tools=None, **settings):
    write_text_files(folder, **settings)
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    if tools is not None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
        (folder / "chat_template.jinja").write_text(chatml.TEMPLATE)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    model = make_model(DecoderConfig.from_hf(CONFIG))
    save_model(model, folder, CONFIG)
    return model, folder


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_s_own_are_used(name, weights, tmp_path):
    """By generate, and by the model that merge writes."""
    of_model, of_adapter, own = CASES[name]
    base, adapter, merged = (tmp_path / one for one in ("base", "adapter", "merged"))
    model, folder = weights
    shutil.copytree(folder, base)
    write(base, **of_model)
    write(adapter, **of_adapter)
    (adapter / "adapter_config.json").write_text("{}")
    args = argparse.Namespace(adapter=adapter, end_tokens=None, chat=True, system=None)
    args.chat_template_kwargs = None
    texts = text_settings(args, base)
    if own is not None:
        assert texts.own == own
    theirs = transformers.AutoTokenizer.from_pretrained(adapter)
    prompt = theirs.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
    assert generate._tokens(args, texts, TALK[0]["content"]) == prompt
    args.chat = False
    assert generate._tokens(args, texts, "a<x>b") == theirs("a<x>b")["input_ids"]

    config = read_config(base)
    save_model(model, merged, config, tokenizer_from=base, files=texts.files(config))
    written = transformers.AutoTokenizer.from_pretrained(merged)
    for more in ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        expected = theirs.apply_chat_template(TALK, add_generation_prompt=True, **more)
        assert written.apply_chat_template(TALK, add_generation_prompt=True, **more) == expected
    assert written("a<x>b")["input_ids"] == theirs("a<x>b")["input_ids"]
    again = TextSettings.of(merged, config)
    assert {*again.end_tokens} == {*texts.end_tokens}
    assert again.tokenizer.to_str() == texts.tokenizer.to_str()


def test_a_tokenizer_with_more_tokens_than_the_model_is_named(weights, tmp_path, capsys):
    folder = shutil.copytree(weights[1], tmp_path / "model")
    write(folder, **TOKEN)
    assert main(["generate", "--model", str(folder), "--prompt", "a<x>"]) == 2
    error = capsys.readouterr().err
    assert f"in {folder} returns token 259 for --prompt; expected less than the model's" in error


def test_tokens_without_a_tokenizer_are_added_to_the_model_s(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write(base)
    adapter.mkdir()
    (adapter / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": ADDED}))
    texts = TextSettings.of(base, CONFIG, adapter=adapter)
    assert texts.own == "tokenizer"
    write(tmp_path / "whole", **TOKEN)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "whole")
    assert texts.tokenizer.encode("a<x>b").ids == theirs("a<x>b")["input_ids"]
