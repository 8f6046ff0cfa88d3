"""Tied weights, whole modules and rows of single tokens: as in PEFT, or refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import torch_dora
from tests.torch_dora.peft_folders import (
    IDS,
    assert_same,
    assert_unchanged,
    base,
    gpt2,
    llama,
    output,
    peft_folder,
    perturbed,
    qwen3,
    reconfigured,
    resize,
    rewritten,
    snapshot,
    tensors_of,
)
from torch_dora.peft import load_adapter, save_adapter

BOTH = ["embed_tokens", "lm_head"]


def adapted(make: Any) -> nn.Module:
    rule = torch_dora.DoRARule(r".*(q_proj|c_attn)", rank=2, alpha=2)
    return perturbed(torch_dora.apply_dora(base(make), rule))


@pytest.mark.parametrize(
    ("make", "saved"),
    [
        (qwen3, ["embed_tokens"]),
        (qwen3, ["lm_head"]),
        (qwen3, BOTH),
        (gpt2, ["wte"]),
        (gpt2, ["lm_head"]),
    ],
)
def test_a_module_that_is_saved_is_untied_as_in_peft(
    make: Any, saved: list[str], tmp_path: Path
) -> None:
    targets = ["c_attn"] if make is gpt2 else ["q_proj"]
    folder, theirs = peft_folder(
        tmp_path / "a",
        make,
        target_modules=targets,
        modules_to_save=saved,
        fan_in_fan_out=make is gpt2,
    )

    ours = load_adapter(base(make), folder)
    save_adapter(ours, tmp_path / "b", modules_to_save=saved)

    assert (output(ours) - output(theirs)).abs().max() <= 1e-5
    assert_same(tensors_of(tmp_path / "b"), tensors_of(folder))


ADAPTED = [
    (["lm_head"], []),
    (["lm_head"], ["embed_tokens"]),
    (["embed_tokens"], []),
    (["embed_tokens"], ["lm_head"]),
    (BOTH, []),
    ([], ["lm_head"]),
    ([], BOTH),
]


@pytest.mark.parametrize(("targets", "saved"), ADAPTED)
def test_one_of_two_tied_modules_alone(
    targets: list[str], saved: list[str], tmp_path: Path
) -> None:
    """Loaded, saved and merged as PEFT computes it: the other module keeps the base's weight, and
    config.json no longer says that they are tied."""
    fields = {"target_modules": ["q_proj", *targets], "modules_to_save": saved or None}
    folder, theirs = peft_folder(tmp_path / "a", qwen3, **fields)
    expected = output(theirs)

    ours = load_adapter(base(qwen3), folder)
    save_adapter(ours, tmp_path / "b", modules_to_save=saved)
    assert ours.config.tie_word_embeddings is (not saved)
    merged = torch_dora.merge_dora(ours)
    merged.save_pretrained(tmp_path / "merged")

    assert (output(ours) - expected).abs().max() <= 1e-5
    assert_same(tensors_of(tmp_path / "b"), tensors_of(folder))
    assert ours.config.tie_word_embeddings is (not saved)
    merged.tie_weights()
    for model in (merged, type(merged).from_pretrained(tmp_path / "merged")):
        assert model.config.tie_word_embeddings is False
        assert (output(model) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("make", [qwen3, llama, gpt2])
@pytest.mark.parametrize("size", [43, 37])
def test_a_vocabulary_of_another_size_than_the_model_s(
    make: Any, size: int, tmp_path: Path, caplog: Any
) -> None:
    model = base(make)
    resize(model, size)
    targets = ["c_attn"] if make is gpt2 else [*BOTH, "q_proj"]
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=targets)
    config.fan_in_fan_out = make is gpt2
    theirs = perturbed(peft.get_peft_model(model, config))
    theirs.save_pretrained(tmp_path, save_embedding_layers=True)
    ids = IDS % size

    ours = load_adapter(base(make), tmp_path)

    with torch.no_grad():
        assert (ours(ids).logits - theirs.eval()(ids).logits).abs().max() <= 1e-5
    assert ours.config.vocab_size == size
    assert any(f"with {size} tokens, and so" in one and "from 40" in one for one in caplog.messages)


@pytest.mark.parametrize("size", [43, 37])
def test_a_model_is_not_resized_if_loading_fails(size: int, tmp_path: Path) -> None:
    model = base(qwen3)
    resize(model, size)
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path, save_embedding_layers=True)
    rewritten(tmp_path, change=lambda tensor: tensor * torch.nan)
    model = base(qwen3)
    expected = output(model)

    with pytest.raises(ValueError, match="NaN or infinity"):
        load_adapter(model, tmp_path)

    assert model.config.vocab_size == 40
    assert torch.equal(output(model), expected)
    torch_dora.apply_dora(model, torch_dora.DoRARule("lm_head", rank=2, alpha=2))
    with pytest.raises(ValueError, match="of another number of tokens, and the model's embedding"):
        load_adapter(model, tmp_path)


@pytest.mark.parametrize("path", ["shared", "decoder.embed_tokens", "lm_head"])
def test_one_of_four_tied_weights_is_merged(path: str, tmp_path: Path) -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=40, **sizes)
    model = transformers.T5ForConditionalGeneration(config).eval()
    rule = torch_dora.DoRARule(re.escape(path), rank=2, alpha=2)
    model = perturbed(torch_dora.apply_dora(model, rule))

    torch_dora.merge_dora(model).save_pretrained(tmp_path)

    ids = {"input_ids": IDS, "decoder_input_ids": IDS.flip(0)}
    loaded = type(model).from_pretrained(tmp_path)
    assert (loaded(**ids).logits - model(**ids).logits).abs().max() <= 1e-5
    assert model.config.tie_word_embeddings is True


def test_one_of_two_tied_modules_is_not_saved_alone(tmp_path: Path) -> None:
    model = adapted(qwen3)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    for one in BOTH:
        with pytest.raises(ValueError, match=r"shares its array.*'lm_head'"):
            save_adapter(model, tmp_path / "a", modules_to_save=[one])

    save_adapter(model, tmp_path / "a", modules_to_save=BOTH)

    theirs = peft.PeftModel.from_pretrained(base(qwen3), tmp_path / "a")
    assert (output(theirs) - output(model)).abs().max() <= 1e-5
    assert (output(load_adapter(base(qwen3), tmp_path / "a")) - output(model)).abs().max() <= 1e-6


def test_tying_that_is_ensured_is_kept(tmp_path: Path) -> None:
    folder, theirs = peft_folder(
        tmp_path,
        qwen3,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    )

    ours = load_adapter(base(qwen3), folder)

    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert (output(ours) - output(theirs)).abs().max() <= 1e-5
    rewritten(folder, change=lambda t: t + torch.rand(t.shape) if t.shape == (40, 24) else t)
    with pytest.raises(ValueError, match=r"lm_head\.weight and .*embed_tokens\.weight differ"):
        load_adapter(base(qwen3), folder)


def test_tying_is_not_ensured_of_embeddings_that_peft_does_not_know_by_name(tmp_path: Path) -> None:
    folder, theirs = peft_folder(
        tmp_path,
        gpt2,
        target_modules=["c_attn"],
        modules_to_save=["wte"],
        fan_in_fan_out=True,
    )
    reconfigured(folder, ensure_weight_tying=True)  # of which PEFT warns, and does nothing

    ours = load_adapter(base(gpt2), folder)

    assert ours.lm_head.weight is not ours.transformer.wte.weight
    assert (output(ours) - output(theirs)).abs().max() <= 1e-5


def test_tokens_of_an_embedding_are_refused_beside_an_adapter_of_the_tied_head(
    tmp_path: Path,
) -> None:
    folder, _ = peft_folder(
        tmp_path,
        qwen3,
        use_dora=False,
        target_modules=["q_proj", "lm_head"],
        trainable_token_indices={"embed_tokens": [7, 2]},
    )
    with pytest.raises(ValueError, match=r"tied to lm_head\.weight, whose adapter PEFT would"):
        load_adapter(base(qwen3), folder)


def test_adapters_that_are_tied_are_refused(tmp_path: Path) -> None:
    folder, _ = peft_folder(tmp_path, qwen3, target_modules=["q_proj", "embed_tokens"])
    reconfigured(folder, ensure_weight_tying=True)
    with pytest.raises(NotImplementedError, match=r"selects model\.embed_tokens, whose weight"):
        load_adapter(base(qwen3), folder)


def test_a_module_that_is_shared_is_untied_at_its_name(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first
            self.third = nn.Linear(4, 4)

        def forward(self, x):
            return self.third(self.second(torch.tanh(self.first(x))))

    config = peft.LoraConfig(r=2, use_dora=True, target_modules=["third"])
    config.modules_to_save = ["second"]
    theirs = perturbed(peft.PeftModel(base(Shared), config)).eval()
    theirs.save_pretrained(tmp_path)

    ours = load_adapter(base(Shared), tmp_path)

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert (ours(x) - theirs(x)).abs().max() <= 1e-6


@pytest.mark.parametrize("make", [qwen3, llama])
@pytest.mark.parametrize(
    "given", [[7, 2], {"embed_tokens": [7, 2]}, {"embed_tokens": [7, 2], "lm_head": [7, 2]}]
)
def test_rows_of_single_tokens(make: Any, given: Any, tmp_path: Path, caplog: Any) -> None:
    folder, theirs = peft_folder(
        tmp_path / "a", make, target_modules=["q_proj"], trainable_token_indices=given
    )

    ours = load_adapter(base(make), folder)
    assert "stores again only where it is given trainable_token_indices=" in caplog.text
    save_adapter(ours, tmp_path / "b", trainable_token_indices=given)

    assert (output(ours) - output(theirs)).abs().max() <= 1e-5
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == (make is qwen3)
    assert_same(tensors_of(tmp_path / "b"), tensors_of(folder))
    again = peft.PeftModel.from_pretrained(base(make), tmp_path / "b")
    assert (output(again) - output(theirs)).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trainable_token_indices": [7, 40]}, "holds row 40 of model.embed_tokens.weight"),
        ({"trainable_token_indices": [7]}, r"has shape \[2, 24\]; expected \[1, 24\]"),
        ({"trainable_token_indices": [7, 7]}, "expected every index once"),
        ({"trainable_token_indices": [7, -1]}, "expected one or more indices from 0 on"),
        ({"trainable_token_indices": {"lm_head": [7, 2]}}, "does not name"),
        ({"trainable_token_indices": None}, "does not name"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save names too"),
        (
            {"trainable_token_indices": {"embed_tokens": [7, 2], "wpe": [0]}},
            "wpe has no rows, though trainable_token_indices names it",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder, _ = peft_folder(
        tmp_path, qwen3, target_modules=["q_proj"], trainable_token_indices=[7, 2]
    )
    reconfigured(folder, **fields)
    model = base(qwen3)
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder)
    assert_unchanged(before, snapshot(model))


def test_rows_of_one_of_two_tied_embeddings_are_refused(tmp_path: Path) -> None:
    def make() -> nn.Module:
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=40, **sizes)
        )

    told = r"decoder\.embed_tokens\.weight, which is tied to shared\.weight"
    rows = {"embed_tokens": [7, 2]}
    folder, _ = peft_folder(
        tmp_path / "a", make, target_modules=["q"], trainable_token_indices=rows
    )
    model = base(make)
    with pytest.raises(ValueError, match=told):
        load_adapter(model, folder)
    torch_dora.apply_dora(model, torch_dora.DoRARule(r".*\.q", rank=2, alpha=2))
    with pytest.raises(ValueError, match=told):
        save_adapter(model, tmp_path / "b", trainable_token_indices=rows)
    save_adapter(model, tmp_path / "b", trainable_token_indices={"shared": [7, 2]})


def test_a_name_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    model = adapted(llama)
    for arguments, told in (
        ({"modules_to_save": ["lm_heat"]}, r"modules_to_save has 'lm_heat'.*lm_head"),
        ({"modules_to_save": "lm_heat"}, r"modules_to_save has 'lm_heat'.*lm_head"),
        ({"trainable_token_indices": {"embed_token": [0]}}, r"has 'embed_token'.*embed_tokens"),
    ):
        with pytest.raises(ValueError, match=told):
            save_adapter(model, tmp_path / "a", **arguments)

    save_adapter(model, tmp_path / "a", modules_to_save="lm_head")

    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head"]
    whole = [key for key in tensors_of(tmp_path / "a") if "lora" not in key]
    assert whole == ["base_model.model.lm_head.weight"]
