"""Tokenizers of folders, held to transformers' AutoTokenizer."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jax_dora.lm.commands import generate
from jax_dora.lm.models.chat import ChatTemplate
from jax_dora.lm.models.tokenizer import TextSettings, prompt_tokens, read_tokenizer
from jax_dora.lm.serve.service import Service

END = "<|end|>"
TEXT = f"<a> b <c>{END}<b>  x<d> <img> Ab ab<a>"


def byte_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<d>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def token(content, **flags):
    default = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": content, **default, "special": True} | flags


def folder_of(path, **files):
    """A folder with `files`, and a tokenizer.json that knows END alone."""
    byte_tokenizer().save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    files = {"tokenizer_config": {}} | files
    files["tokenizer_config"] = settings | files["tokenizer_config"]
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


LISTED = {"257": token(END), "258": token("<a>", lstrip=True), "259": token("<c>", rstrip=True)}
FOLDERS = {
    "listed": {"tokenizer_config": {"added_tokens_decoder": LISTED}},
    "listed, not special": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "257": token(END),
                "258": token("Ab", special=False, normalized=True),
                "259": token("<a>", special=False, single_word=True),
            },
            "pad_token": "<a>",
        }
    },
    "listed out of order, of the vocabulary": {
        "tokenizer_config": {
            "added_tokens_decoder": {"258": token("<b>"), "257": token(END), "256": token("<d>")}
        }
    },
    "named": {
        "tokenizer_config": {
            "bos_token": "<a>",
            "pad_token": {"__type": "AddedToken", **token("<c>", rstrip=True)},
            "image_token": "<img>",
            "unk_token": None,
            "add_bos_token": True,
        }
    },
    "named, of the vocabulary": {"tokenizer_config": {"bos_token": "<d>"}},
    "others": {"tokenizer_config": {"extra_special_tokens": ["<a>", "<b>"]}},
    "others, by name": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<img>"}}},
    "others, as of old": {"tokenizer_config": {"additional_special_tokens": ["<b>", "<a>"]}},
    "others beside listed ones": {
        "tokenizer_config": {
            "added_tokens_decoder": LISTED,
            "additional_special_tokens": ["<b>", "<a>"],
            "pad_token": "<d>",
        }
    },
    "map": {
        "special_tokens_map": {
            "bos_token": token("<a>", lstrip=True),
            "eos_token": "<c>",
            "additional_special_tokens": ["<b>"],
        }
    },
    "map beside listed ones": {
        "tokenizer_config": {"added_tokens_decoder": LISTED},
        "special_tokens_map": {"bos_token": "<b>"},
        "added_tokens": {"<img>": 260},
    },
    "added": {
        "added_tokens": {"<c>": 259, "<a>": 258, "Ab": 260},
        "special_tokens_map": {"pad_token": "<a>"},
    },
    "special tokens as text": {"tokenizer_config": {"split_special_tokens": True}},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_transformers(name, tmp_path):
    folder = folder_of(tmp_path, **FOLDERS[name])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = read_tokenizer(folder)
    ids = theirs(TEXT)["input_ids"]
    assert ours.encode(TEXT).ids == ids
    assert ours.get_vocab() == theirs.get_vocab()
    for skip in (False, True):
        expected = theirs.backend_tokenizer.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("text", ["", "a b", "<s>a", "<s>a</s>", "a<s>"])
@pytest.mark.parametrize(("begin", "end"), [("", ""), ("<s>", ""), ("<s>", "</s>"), ("", "</s>")])
def test_a_prompt_begins_once_and_does_not_end(begin, end, text):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}".strip(),
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")],
    )
    whole = text if text.startswith("<s>") else begin + text
    expected = tokenizer.encode(whole, add_special_tokens=False).ids
    assert prompt_tokens(tokenizer, text) == expected
    none: Any = None
    texts = TextSettings(Path(), tokenizer, [0], None, Path(), Path())
    service = Service("base", none, none, texts, tokenizer.get_vocab_size())
    assert generate._tokens(argparse.Namespace(chat=False), texts, text) == expected
    if expected:
        assert service.tokens(text, texts) == expected


@pytest.mark.parametrize("name", FOLDERS)
def test_templates_know_the_tokens_that_transformers_tells_them(name, tmp_path):
    folder = folder_of(tmp_path, **FOLDERS[name])
    template = "{{ [bos_token, eos_token, pad_token, unk_token, image_token] }}"
    (folder / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "a"}]
    expected = theirs.apply_chat_template(talk, tokenize=False)
    ours = ChatTemplate.of(folder)
    assert ours is not None
    assert ours.render(talk) == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": {"added_tokens_decoder": {"5": token("<a>")}}},
            r"gives the token '<a>' the id 5, but its tokenizer.json makes it 258",
        ),
        ({"added_tokens": {"<a>": 300}}, "gives the token '<a>' the id 300, but .* makes it 258"),
        ({"added_tokens": {"<a>": "x"}}, "added_tokens.json has '<a>': 'x'; expected a token id"),
        ({"added_tokens": []}, "added_tokens.json holds a list; expected a JSON object"),
        ({"special_tokens_map": {"bos_token": 3}}, "special_tokens_map.json has bos_token 3; exp"),
        ({"tokenizer_config": {"bos_token": {}}}, "tokenizer_config.json has bos_token {}; exp"),
        (
            {"tokenizer_config": {"extra_special_tokens": [3]}},
            "tokenizer_config.json has extra_special_tokens with 3; expected a string",
        ),
        (
            {"tokenizer_config": {"extra_special_tokens": 3}},
            "tokenizer_config.json has extra_special_tokens 3; expected a list of tokens",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"x": token("<a>")}}},
            "tokenizer_config.json has added_tokens_decoder with 'x'; expected token ids",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": []}},
            r"tokenizer_config.json has added_tokens_decoder \[\]; expected an object",
        ),
    ],
)
def test_files_that_contradict_each_other_or_are_damaged(files, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_tokenizer(folder_of(tmp_path, **files))
