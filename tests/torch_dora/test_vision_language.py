"""transformers' vision-language models with an image: their language model, vision tower and
projector adapted, against PEFT and fp64."""

import copy
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F

from benchmarks.vision_language import MODELS, VisionLanguageModel
from parity import oracle
from tests.torch_dora.peft_folders import perturbed
from torch_dora import DoRARule, apply_dora, merge_dora
from torch_dora.layers import dora_layers
from torch_dora.peft import load_adapter, save_adapter

# One of each architecture.
TINY = {one.name: one.tiny() for one in MODELS if one.name != "Qwen3-VL-32B"}
TOKENS, LAST = 40, 12
NAMES = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "magnitude"}


def computed(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Returns the logits [LAST, vocabulary], after the gradient of a loss."""
    logits = model(**inputs, logits_to_keep=LAST).logits[0]
    F.cross_entropy(logits, inputs["input_ids"][0, -LAST:]).backward()
    return logits.detach()


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: one.to(dtype) if one.is_floating_point() else one for n, one in inputs.items()}


def made(tiny: VisionLanguageModel) -> tuple[Any, dict[str, Any]]:
    model = tiny.make("cpu", torch.float32).eval()
    return model, tiny.inputs(model, TOKENS, "cpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", TINY)
def test_logits_and_all_gradients_are_peft_s_in_fp64(name: str, tmp_path: Any) -> None:
    plain, inputs = made(TINY[name])
    base = copy.deepcopy(plain)
    config = peft.LoraConfig(r=3, lora_alpha=4, use_dora=True, target_modules="all-linear")
    theirs: Any = perturbed(peft.get_peft_model(copy.deepcopy(plain), config))
    theirs.save_pretrained(tmp_path / "theirs")
    expected = computed(theirs.double(), cast(inputs, torch.float64))

    model = load_adapter(plain, tmp_path / "theirs")
    parts = {path.split(".")[1] for path, _ in dora_layers(model)}
    assert len(parts) > 1, "the language model alone is adapted"
    found = computed(model, inputs)
    assert off(found, expected) < 1e-5
    gradients = {
        f"{key.removeprefix('base_model.model.').partition('.' + theirs_name)[0]}.{ours}": one.grad
        for key, one in theirs.named_parameters()
        for theirs_name, ours in NAMES.items()
        if f".{theirs_name}." in key
    }
    layers = dict(dora_layers(model))
    assert len(gradients) == 3 * len(layers)
    for key, gradient in gradients.items():
        path, _, attribute = key.rpartition(".")
        ours = getattr(layers[path], attribute).grad
        assert float(ours.abs().max()) > 0, key
        assert off(ours, gradient) < 1e-4, key

    # In fp64, with the merged weights of the oracle in the plain model.
    exact = copy.deepcopy(base).double()
    for path, layer in layers.items():
        parts = (layer.weight, layer.lora_a, layer.lora_b, layer.magnitude)
        exact.get_submodule(path).weight.data = oracle.merged_weight(
            *(one.detach() for one in parts), layer.scale
        )
    with torch.no_grad():
        logits = exact(**cast(inputs, torch.float64), logits_to_keep=LAST).logits[0]
        merged = merge_dora(model)(**inputs, logits_to_keep=LAST).logits[0]
    assert off(found, logits) < 1e-5
    assert off(merged, logits) < 1e-5
    with torch.no_grad():
        assert off(base(**inputs, logits_to_keep=LAST).logits[0], logits) > 1e-2

    save_adapter(model, tmp_path / "ours")
    again: Any = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    with torch.no_grad():
        assert off(again(**inputs, logits_to_keep=LAST).logits[0], expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_generate_continues_an_image_as_in_peft(name: str, tmp_path: Any) -> None:
    plain, inputs = made(TINY[name])
    model = apply_dora(copy.deepcopy(plain), DoRARule("all-linear", 3, 4))
    perturbed(model)
    save_adapter(model, tmp_path / "ours")
    theirs: Any = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}
    found = model.generate(**inputs, **options)
    assert found.shape == (1, TOKENS + 6)
    assert torch.equal(found, theirs.generate(**inputs, **options))


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double().flatten(), expected.double().flatten()
    return float((found - expected).norm() / expected.norm())
