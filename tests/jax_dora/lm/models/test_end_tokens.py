"""The tokens that end an answer, held to what transformers reads from the same folders."""

import json

import pytest
import transformers

from jax_dora.lm.finetune.packing import Example
from jax_dora.lm.finetune.reply_ends import learned_ends
from jax_dora.lm.models import read_config
from jax_dora.lm.models.end_tokens import token_id
from jax_dora.lm.models.tokenizer import TextSettings, read_tokenizer
from tests.jax_dora.lm.chatml import BEGIN, CONFIG, REPLY_END, TEMPLATE, TEXT_END, write_text_files

# The config is that of a base model; its template, and what its files say besides.
FOLDERS = {
    "config.json alone": (None, {"eos_token": None}, None),
    "the template of a base model": (TEMPLATE, {}, None),
    "an end that the template does not write": (None, {"eos_token": "<|im_end|>"}, None),
    "generation_config.json": (None, {}, [TEXT_END, REPLY_END]),
    "one in generation_config.json": (None, {}, BEGIN),
    "all": (TEMPLATE, {"eos_token": "<|im_end|>"}, BEGIN),
    "a template that writes the tokenizer's": (
        "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
        {"eos_token": "<|im_end|>"},
        None,
    ),
    "a template that writes none": ("{% for m in messages %}{{ m.content }}{% endfor %}", {}, None),
    "a template that wants no reply": ("{{ raise_exception('no') }}", {}, None),
}


@pytest.fixture
def folder_of(tmp_path):
    """Makes a folder from a template, settings of the tokenizer, and generation_config's ends."""

    def make(template, settings, generation):
        write_text_files(tmp_path, template, **settings)
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        if generation is not None:
            ends = {"eos_token_id": generation}
            (tmp_path / "generation_config.json").write_text(json.dumps(ends))
        return tmp_path

    return make


def expected_ends(folder):
    """What transformers says: of the configs, the tokenizer, and the text behind a reply."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ends = [transformers.AutoConfig.from_pretrained(folder).eos_token_id, tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        ends.append(transformers.GenerationConfig.from_pretrained(folder).eos_token_id)
    found = {one for end in ends for one in (end if isinstance(end, list) else [end])} - {None}
    if tokenizer.chat_template and "raise" not in tokenizer.chat_template:
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "okay"}]
        after = tokenizer.apply_chat_template(talk, tokenize=False).partition("okay")[2]
        found |= {one for one in tokenizer(after)["input_ids"] if one >= TEXT_END}
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_ends_are_those_of_every_file(name, folder_of):
    folder = folder_of(*FOLDERS[name])
    ends = TextSettings.of(folder, read_config(folder)).end_tokens
    assert len(ends) == len(set(ends))
    assert set(ends) == expected_ends(folder)
    assert ends[0] == TEXT_END  # config.json's, with which completions end


def test_ends_that_the_caller_names_come_first(folder_of):
    folder = folder_of(None, {}, None)
    texts = TextSettings.of(folder, read_config(folder), end_tokens=["<|im_end|>", "10", "a"])
    assert texts.end_tokens == [REPLY_END, 10, texts.tokenizer.token_to_id("a"), TEXT_END]


def test_a_folder_without_an_end_is_refused(folder_of):
    folder = folder_of(None, {"eos_token": None}, None)
    config = {name: value for name, value in CONFIG.items() if name != "eos_token_id"}
    with pytest.raises(ValueError, match="names no token that ends a text; expected an eos_token_"):
        TextSettings.of(folder, config)
    assert TextSettings.of(folder, config, end_tokens=["257"]).end_tokens == [BEGIN]


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("259", "end_tokens has 259; expected a token id from 0 to 258"),
        ("ab", "end_tokens has 'ab', which the tokenizer splits into 2 tokens; expected one"),
        ("", "end_tokens has '', which the tokenizer splits into 0 tokens"),
    ],
)
def test_what_is_no_token(token, message, folder_of):
    tokenizer = read_tokenizer(folder_of(None, {}, None))
    with pytest.raises(ValueError, match=message):
        token_id(tokenizer, token)


def test_an_adapter_brings_ends(folder_of, tmp_path):
    folder = folder_of(None, {}, None)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    plain = TextSettings.of(folder, read_config(folder), adapter=adapter)
    assert plain.end_tokens == [TEXT_END]
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [REPLY_END]}))
    texts = TextSettings.of(folder, read_config(folder), adapter=adapter)
    assert texts.end_tokens == [REPLY_END, TEXT_END]
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_start|>"}))
    texts = TextSettings.of(folder, read_config(folder), adapter=adapter)
    assert texts.end_tokens == [REPLY_END, BEGIN, TEXT_END]


@pytest.mark.parametrize("generation", [None, {"temperature": 0.5, "eos_token_id": 3}])
def test_what_is_written_is_what_transformers_generates_with(generation, folder_of, tmp_path):
    folder = folder_of(TEMPLATE, {}, None)
    config = read_config(folder) | {"bos_token_id": BEGIN}
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    [(name, text)] = TextSettings.of(folder, config).files(config).items()
    written = tmp_path / "written"
    written.mkdir()
    (written / name).write_text(text)
    theirs = transformers.GenerationConfig.from_pretrained(written)
    assert theirs.eos_token_id == [TEXT_END, *([] if generation is None else [3]), REPLY_END]
    expected = (BEGIN, None) if generation is None else (None, 0.5)
    assert (theirs.bos_token_id, theirs.temperature) == expected


def test_replies_end_in_their_last_token_that_is_not_blank(folder_of):
    """Of several replies in one text, too; blanks count where a reply is nothing else, or where
    they are known to end a text."""
    tokenizer = read_tokenizer(folder_of(None, {}, None))

    def example(*pieces):
        encoded = [
            (tokenizer.encode(text, add_special_tokens=False).ids, is_learned)
            for text, is_learned in pieces
        ]
        tokens = [one for ids, _ in encoded for one in ids]
        return Example(tokens, [known for ids, known in encoded for _ in ids])

    (a, space), newline = tokenizer.encode("a ").ids, tokenizer.encode("\n").ids[0]
    chat = example(("q", False), ("ok<|im_end|>\n", True), ("q", False), ("a \n", True))
    examples = [chat, example(("q<|im_start|>", False), (" \n", True)), example(("q", False))]
    assert learned_ends(examples, tokenizer, [TEXT_END]) == ([REPLY_END], {a: 1, space: 1})
    assert learned_ends(examples, tokenizer, [REPLY_END]) == ([], {a: 1, space: 1})
    assert learned_ends(examples, tokenizer, [REPLY_END, newline]) == ([], {})
    completion = example(("q", False), ("ok<|endoftext|>", True))
    assert learned_ends([completion], tokenizer, [TEXT_END]) == ([], {})
