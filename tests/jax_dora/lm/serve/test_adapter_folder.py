"""What the server reads of an adapter's folder, and what it refuses, with a reason that helps."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from jax_dora.lm.finetune import tiny
from jax_dora.lm.models import DecoderConfig, make_model, read_config
from jax_dora.lm.models.tokenizer import TextSettings
from jax_dora.lm.serve import adapter_folder
from jax_dora.lm.serve.adapter_folder import AdapterTexts, read_arrays
from jax_dora.lm.serve.runner import make_store
from tests.jax_dora.lm import chatml
from tests.jax_dora.lm.chatml import BEGIN, REPLY_END, TEXT_END
from tests.jax_dora.lm.serve.test_answers import drawn_tokens
from tests.jax_dora.lm.serve.test_http import until

Q_PROJ = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
SIZES = {"lm_head": (64, 257), "model.embed_tokens": (257, 64)} | dict.fromkeys(Q_PROJ, (64, 64))


def write(folder, modules, rank=2, whole=(), **config):
    """Writes an adapter of PyTorch modules, as PEFT does; those in `whole` are stored whole."""
    tensors = {}
    for name in modules:
        n_in, out = SIZES[name]
        a, b = ("embedding_A", "embedding_B") if "embed" in name else ("A.weight", "B.weight")
        for suffix, shape in ((a, (rank, n_in)), (b, (out, rank))):
            tensors[f"base_model.model.{name}.lora_{suffix}"] = np.ones(shape, np.float32)
    for name in whole:
        tensors[f"base_model.model.{name}.weight"] = np.ones((257, 64), np.float32)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 4,
        "target_modules": [name.rpartition(".")[2] for name in modules],
        "modules_to_save": [name.rpartition(".")[2] for name in whole] or None,
    } | config
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def bank(request):
    config = DecoderConfig.from_hf(tiny.CONFIG | {"tie_word_embeddings": request.param})
    return make_store(make_model(config), 2, 4).bank


@pytest.mark.parametrize(
    ("modules", "options", "message"),
    [
        (["lm_head"], {}, "changes the embedding or the output head, which all adapters of a"),
        ([*Q_PROJ, "model.embed_tokens"], {}, "serve the model that jax-dora merge makes of it"),
        (Q_PROJ, {"whole": ["lm_head"]}, "They are:\n  base_model.model.lm_head.weight"),
        (Q_PROJ, {"rank": 5}, "has rank 5; expected at most 4: start the server with max_rank=5"),
        (
            Q_PROJ,
            {"rank": 8, "rank_pattern": {"q_proj": 8}},
            "has rank 8; expected at most 4: start the server with max_rank=8 or more",
        ),
    ],
)
def test_refusals(modules, options, message, bank, tmp_path):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        read_arrays(bank, write(tmp_path / "adapter", modules, **options))
    assert message in str(caught.value)


def test_what_fits_is_read(bank, tmp_path):
    assert read_arrays(bank, write(tmp_path / "adapter", Q_PROJ, rank=4)).rank == 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    chatml.write_text_files(folder)
    (folder / "config.json").write_text(json.dumps(chatml.CONFIG))
    return folder


def test_adapters_share_what_their_files_say(base, tmp_path):
    settings = TextSettings.of(base, read_config(base))
    texts = AdapterTexts(settings)
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    assert texts.read(folders[0]) is settings
    for folder in folders[:2]:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": BEGIN}))
    one = texts.read(folders[0])
    assert one is texts.read(folders[1])
    assert one.end_tokens == [BEGIN, TEXT_END, REPLY_END]
    assert (one.tokenizer, one.own) == (settings.tokenizer, "")
    # The same tokenizer, saved by another program.
    chatml.write_text_files(folders[2], pad_token="<|im_end|>")
    stored = json.loads((folders[2] / "tokenizer.json").read_text())
    stored["padding"] = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None}
    stored["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    (folders[2] / "tokenizer.json").write_text(json.dumps(stored, indent=3))
    assert texts.read(folders[2]).own == ""
    (folders[2] / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert texts.read(folders[2]).own == "chat template"
    chatml.write_text_files(folders[3], additional_special_tokens=["<x>"])
    other = texts.read(folders[3])
    assert other.own == "tokenizer"
    assert other.tokenizer.encode("a<x>").ids[-1] == 259


def test_texts_that_are_refused(base, tmp_path, monkeypatch):
    texts = AdapterTexts(TextSettings.of(base, read_config(base)))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="not valid jinja2"):
        texts.read(tmp_path)
    monkeypatch.setattr(adapter_folder, "_TEXT_BYTES", 7)
    with pytest.raises(ValueError, match=r"chat_template.jinja has more than 7 bytes; expected"):
        texts.read(tmp_path)


@pytest.mark.ci
def test_an_adapter_answers_in_its_own_template_until_its_own_end(served, adapters):
    server, client = served
    folder = adapters / "own"
    template = "{% for m in messages %}{{ m.content }}{{ '=' }}{% endfor %}"
    options = {"temperature": 0, "max_tokens": 8}
    chat = {"messages": [{"role": "user", "content": "12+30"}], **options}
    plain = client.completions.create(model="french", prompt="12+30=", logprobs=0, **options)
    tokens = drawn_tokens(plain, server.service.texts.tokenizer)
    end = tokens[4]
    try:
        shutil.copytree(adapters / "french", folder)
        (folder / "chat_template.jinja").write_text(template)
        until(lambda: "own" in server.adapters)
        answer = client.chat.completions.create(model="own", **chat)
        assert answer.choices[0].message.content == plain.choices[0].text
        assert answer.usage == plain.usage
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        until(lambda: end in server.adapters.get("own").extra.end_tokens)
        for request in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            answer = client.chat.completions.create(model="own", **chat, **request)
            last = list(answer)[-1] if request else answer
            assert last.usage.completion_tokens == tokens.index(end) + 1
    finally:
        shutil.rmtree(folder)
        until(lambda: "own" not in server.adapters)
