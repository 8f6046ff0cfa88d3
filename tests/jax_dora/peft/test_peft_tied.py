"""Tied weights and rows of single tokens in Flax: as in PEFT, or refused by name."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx
from torch import nn

import jax_dora
from jax_dora.lm import models
from jax_dora.peft import Names, UntiedEmbed, load_adapter, save_adapter
from tests.jax_dora.peft.peft_folders import assert_same, tensors_of
from tests.tables import thinned
from tests.torch_dora.architectures import DECODER as SIZES
from tests.torch_dora.peft_folders import perturbed, resize

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
BOTH = ["embed_tokens", "lm_head"]
IDS = np.random.default_rng(0).integers(0, 40, (2, 7))
TOLERANCE = 1e-6


def tied(folder: Path, *, tie: bool = True) -> nn.Module:
    """A model in a folder of its own too; the same every time."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=tie)
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder / "base")
    return model


def peft_folder(folder: Path, model: Any, **fields: Any) -> tuple[Path, np.ndarray]:
    """A folder that PEFT wrote, and the logits of its model."""
    options = {"r": 3, "lora_alpha": 5, "use_dora": True, "target_modules": ["q_proj"]} | fields
    theirs = perturbed(peft.get_peft_model(model, peft.LoraConfig(**options))).eval()
    theirs.save_pretrained(folder / "theirs", save_embedding_layers=False)
    return folder / "theirs", torch_logits(theirs)


def torch_logits(model: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(IDS)).logits.numpy()


def logits(model: nnx.Module) -> np.ndarray:
    model.eval()
    return np.asarray(model(jnp.asarray(IDS)))


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return np.abs(a - b).max() / max(1, np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize("saved", thinned([["embed_tokens"], ["lm_head"], BOTH], [BOTH]))
def test_a_module_that_is_saved_is_untied_as_in_peft(saved: list[str], tmp_path: Path) -> None:
    folder, expected = peft_folder(tmp_path, tied(tmp_path), modules_to_save=saved)
    base = models.load_model(tmp_path / "base")
    before = logits(base)

    ours = load_adapter(base, folder)
    save_adapter(ours, tmp_path / "again", modules_to_save=saved)

    assert relative(logits(ours), expected) <= TOLERANCE
    assert_same(tensors_of(tmp_path / "again"), tensors_of(folder))
    assert base.lm_head is None
    assert (logits(base) == before).all()


ADAPTED = [
    (["lm_head"], []),
    (["lm_head"], ["embed_tokens"]),
    (["embed_tokens"], []),
    (["embed_tokens"], ["lm_head"]),
    (BOTH, []),
]


@pytest.mark.ci
@pytest.mark.parametrize(("targets", "saved"), thinned(ADAPTED, ADAPTED[2:3], ADAPTED[:1]))
def test_an_adapter_of_one_of_two_tied_modules(
    targets: list[str], saved: list[str], tmp_path: Path
) -> None:
    """Loaded, saved and merged as PEFT computes it: the other module keeps the base's weight."""
    fields = {"target_modules": ["q_proj", *targets], "modules_to_save": saved or None}
    folder, expected = peft_folder(tmp_path, tied(tmp_path), **fields)
    base = models.load_model(tmp_path / "base")
    before = logits(base)

    ours = load_adapter(base, folder)
    save_adapter(ours, tmp_path / "again", modules_to_save=saved)
    merged = jax_dora.merge_dora(ours)
    config = models.read_config(tmp_path / "base")
    models.save_model(merged, tmp_path / "merged", config)

    assert relative(logits(ours), expected) <= TOLERANCE
    assert relative(before, expected) > 1e3 * TOLERANCE
    assert_same(tensors_of(tmp_path / "again"), tensors_of(folder))
    assert models.read_config(tmp_path / "merged") == config | {"tie_word_embeddings": False}
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "merged")
    assert relative(torch_logits(theirs), expected) <= TOLERANCE
    assert base.lm_head is None
    assert (logits(base) == before).all()


@pytest.mark.ci
def test_tying_that_is_ensured_is_kept(tmp_path: Path) -> None:
    fields = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    folder, expected = peft_folder(tmp_path, tied(tmp_path), **fields)
    base = models.load_model(tmp_path / "base")

    ours = load_adapter(base, folder)

    assert ours.lm_head is None
    assert relative(logits(ours), expected) <= TOLERANCE
    assert relative(logits(base), expected) > 1e3 * TOLERANCE


@pytest.mark.slow
def test_one_of_two_tied_modules_is_not_saved_alone(tmp_path: Path) -> None:
    model = tied(tmp_path)
    rule = jax_dora.DoRARule(".*/q_proj", rank=2, alpha=2)
    ours = jax_dora.apply_dora(models.load_model(tmp_path / "base"), rule, rngs=nnx.Rngs(0))
    embedding = ours.model.embed_tokens.embedding
    embedding.set_value(1.5 * embedding.get_value())
    for one in BOTH:
        with pytest.raises(ValueError, match=r"shares its array.*'lm_head'"):
            save_adapter(ours, tmp_path / "a", modules_to_save=one)

    save_adapter(ours, tmp_path / "a", modules_to_save=BOTH)

    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "a")
    assert relative(torch_logits(theirs), logits(ours)) <= TOLERANCE


@pytest.mark.ci
def test_a_resized_vocabulary_of_a_tied_model(tmp_path: Path) -> None:
    model = tied(tmp_path)
    model.resize_token_embeddings(43, mean_resizing=False)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    theirs = peft.get_peft_model(
        model, peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"])
    )
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    assert f"base_model.model.{BOTH[1]}.weight" in tensors_of(tmp_path / "theirs")

    ours = load_adapter(models.load_model(tmp_path / "base"), tmp_path / "theirs")

    assert ours.lm_head is None
    assert relative(logits(ours), torch_logits(theirs)) <= TOLERANCE


RESIZED = [(tie, 43, targets) for tie in (True, False) for targets in ([], ["lm_head", "q_proj"])]
RESIZED += [(True, 37, BOTH), (False, 37, BOTH)]


@pytest.mark.ci
@pytest.mark.parametrize(("tie", "size", "targets"), thinned(RESIZED, RESIZED[1:2], RESIZED[5:]))
def test_a_vocabulary_of_another_size_than_the_model_s(
    tie: bool, size: int, targets: list[str], tmp_path: Path, caplog: Any
) -> None:
    model = tied(tmp_path, tie=tie)
    resize(model, size)
    fields = {"r": 2, "use_dora": True, "target_modules": [*targets, "v_proj"]}
    # Both tables are stored, by one way or another.
    saved = [] if tie or targets == BOTH else [one for one in BOTH if one not in targets]
    theirs = peft.get_peft_model(model, peft.LoraConfig(**fields, modules_to_save=saved or None))
    perturbed(theirs).save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    ids = IDS % size
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(ids)).logits.numpy()
    base = models.load_model(tmp_path / "base")

    ours = load_adapter(base, tmp_path / "theirs")
    models.save_model(
        jax_dora.merge_dora(ours), tmp_path / "merged", models.read_config(tmp_path / "base")
    )

    ours.eval()
    assert relative(np.asarray(ours(jnp.asarray(ids))), expected) <= TOLERANCE
    assert any(f"with {size} tokens, and so" in one and "from 40" in one for one in caplog.messages)
    assert base.config.vocab_size == 40
    merged = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert relative(merged(torch.from_numpy(ids)).logits.numpy(), expected) <= TOLERANCE


@pytest.mark.ci
def test_a_vocabulary_that_the_folder_does_not_store(tmp_path: Path) -> None:
    model = tied(tmp_path)
    resize(model, 43)
    model.save_pretrained(tmp_path / "resized")
    folder, _ = peft_folder(tmp_path, model, target_modules=["lm_head", "q_proj"])
    base = models.load_model(tmp_path / "base")
    told = r"lm_head\.lora_B\.weight is of 43 tokens, but the model has 40.*save_embedding_layers"
    with pytest.raises(ValueError, match=told):
        load_adapter(base, folder)
    assert load_adapter(models.load_model(tmp_path / "resized"), folder).config.vocab_size == 43

    class Other(nnx.Module):
        def __init__(self) -> None:
            self.model, self.lm_head = base.model, nnx.data(None)

    model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "resized")
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    with pytest.raises(ValueError, match="with 43 tokens, and this Other has 40 and no method"):
        load_adapter(Other(), tmp_path / "theirs")


@pytest.mark.ci
def test_rows_of_single_tokens(tmp_path: Path, caplog: Any) -> None:
    model = tied(tmp_path)
    folder, expected = peft_folder(tmp_path, model, trainable_token_indices=[7, 2])

    ours = load_adapter(models.load_model(tmp_path / "base"), folder)
    assert caplog.messages == [
        f"{folder} replaces parameters of the base model, which save_adapter stores again only "
        "where it is given trainable_token_indices=(7, 2)"
    ]
    save_adapter(ours, tmp_path / "again", trainable_token_indices=[7, 2])

    assert relative(logits(ours), expected) <= TOLERANCE
    assert_same(tensors_of(tmp_path / "again"), tensors_of(folder))
    again = peft.PeftModel.from_pretrained(tied(tmp_path), tmp_path / "again")
    assert relative(torch_logits(again), expected) <= TOLERANCE


def test_rows_of_a_tied_head_are_those_of_the_embedding(tmp_path: Path) -> None:
    """PEFT stores them once, and different rows of the two are not tied."""
    rows = {"embed_tokens": [7, 2], "lm_head": [7, 2]}
    folder, expected = peft_folder(tmp_path, tied(tmp_path), trainable_token_indices=rows)

    ours = load_adapter(models.load_model(tmp_path / "base"), folder)
    save_adapter(ours, tmp_path / "again", trainable_token_indices=rows)

    assert relative(logits(ours), expected) <= TOLERANCE
    assert_same(tensors_of(tmp_path / "again"), tensors_of(folder))
    again = peft.PeftModel.from_pretrained(tied(tmp_path), tmp_path / "again")
    assert relative(torch_logits(again), expected) <= TOLERANCE
    told = r"lm_head\.weight, which is tied to model\.embed_tokens\.weight.*expected only rows of"
    with pytest.raises(ValueError, match=told):
        save_adapter(ours, tmp_path / "b", trainable_token_indices=rows | {"lm_head": [7, 3]})


def test_rows_of_one_of_several_embeddings_are_told_by_its_name(
    tmp_path: Path, caplog: Any
) -> None:
    class TwoEmbeddings(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.tokens, self.places = (nnx.Embed(5, 4, rngs=rngs) for _ in range(2))
            self.q = nnx.Linear(4, 4, rngs=rngs)

    rule = jax_dora.DoRARule("q", rank=2, alpha=2)
    model = jax_dora.apply_dora(TwoEmbeddings(), rule, rngs=nnx.Rngs(0))
    save_adapter(model, tmp_path / "a", trainable_token_indices={"tokens": [3, 1]})
    config = tmp_path / "a" / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"trainable_token_indices": [3, 1]}
    config.write_text(json.dumps(fields))

    loaded = load_adapter(TwoEmbeddings(), tmp_path / "a")

    assert caplog.messages[-1].endswith("it is given trainable_token_indices={'tokens': (3, 1)}")
    save_adapter(loaded, tmp_path / "b", trainable_token_indices={"tokens": (3, 1)})
    assert_same(tensors_of(tmp_path / "b"), tensors_of(tmp_path / "a"))


class Attending(nnx.Module):
    """Its head is its embedding, as no name tells."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.q = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, ids):
        return self.embed.attend(self.q(self.embed(ids)))


def test_an_embedding_that_may_be_the_head_is_untied(tmp_path: Path) -> None:
    base = Attending()
    rule = jax_dora.DoRARule("q", rank=2, alpha=2)
    model = jax_dora.apply_dora(base, rule, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"has embed, and the model has no head.*UntiedEmbed"):
        save_adapter(model, tmp_path / "a", modules_to_save=["embed"])
    model.embed = UntiedEmbed(model.embed)
    model.embed.embedding = nnx.Param(2 * model.embed.embedding[...])

    save_adapter(model, tmp_path / "a", modules_to_save=["embed"])
    loaded = load_adapter(base, tmp_path / "a")

    ids = jnp.arange(5)
    np.testing.assert_array_equal(loaded(ids), model(ids))
    with pytest.raises(TypeError, match="UntiedEmbed"):
        jax_dora.apply_dora(loaded, jax_dora.DoRARule("embed", rank=2, alpha=2), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(loaded(ids), base.embed.attend(base.q(2 * base.embed(ids))), 1e-5)


def test_merging_keeps_a_head_that_is_not_adapted() -> None:
    """Whose it is, is known by nothing but the embedding's `attend`."""
    ids = jnp.arange(5)
    rules = [
        jax_dora.DoRARule("embed", rank=2, alpha=3, adapt_attend=attend) for attend in (False, True)
    ]
    adapted = []
    for rule in rules:
        model = jax_dora.apply_dora(Attending(), rule, rngs=nnx.Rngs(1))
        generator = np.random.default_rng(2)
        for name in ("lora_a", "magnitude"):
            variable = getattr(model.embed, name)
            variable.set_value(jnp.asarray(generator.uniform(1, 2, variable.shape), jnp.float32))
        adapted.append(model)
    base, (apart, alike) = Attending(), adapted

    merged = jax_dora.merge_dora(apart)

    assert type(merged.embed) is UntiedEmbed
    np.testing.assert_allclose(merged(ids), apart(ids), rtol=1e-4, atol=1e-6)
    assert type(jax_dora.merge_dora(alike).embed) is nnx.Embed
    np.testing.assert_allclose(jax_dora.merge_dora(alike)(ids), alike(ids), rtol=1e-4, atol=1e-6)
    both = jax_dora.merge_dora(base, adapters=[jax_dora.get_adapter(one) for one in adapted])
    # Only the second adapter reaches the head.
    np.testing.assert_allclose(
        both.embed.attend(jnp.eye(4)), alike.embed.attend(jnp.eye(4)), rtol=1e-4, atol=1e-6
    )


def test_what_is_shared_is_not_written_twice(tmp_path: Path) -> None:
    class Shared(nnx.Module):
        def __init__(self, *, by: str) -> None:
            rngs = nnx.Rngs(0)
            self.a = nnx.Linear(4, 4, rngs=rngs)
            self.b = nnx.Linear(4, 4, rngs=rngs) if by == "array" else self.a
            self.b.kernel = self.a.kernel
            self.q = nnx.Linear(4, 4, rngs=rngs)

    rule = jax_dora.DoRARule("q", rank=2, alpha=2)
    model = jax_dora.apply_dora(Shared(by="array"), rule, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"has a\.weight, which shares its array with b\.weight"):
        save_adapter(model, tmp_path / "a", modules_to_save=["a"])
    model.b.kernel = nnx.Param(model.b.kernel[...])
    model.a.kernel.set_value(2 * model.a.kernel[...])
    save_adapter(model, tmp_path / "a", modules_to_save=["a"])

    loaded = load_adapter(Shared(by="array"), tmp_path / "a")

    np.testing.assert_array_equal(loaded.a.kernel[...], 2 * loaded.b.kernel[...])
    with pytest.raises(NotImplementedError, match=r"a\.bias and b\.bias at once"):
        load_adapter(Shared(by="module"), tmp_path / "a", names=Names())
