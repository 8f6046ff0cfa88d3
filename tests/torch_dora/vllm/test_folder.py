"""Folders that vLLM hands to the plugin, without vLLM."""

import math

import pytest
import torch

from torch_dora.vllm import folder
from torch_dora.vllm.folder import FolderError

CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 3,
    "use_dora": True,
    "target_modules": ["q_proj", "down_proj"],
    "vllm_max_position_embeddings": 64,
}
PREFIX = "base_model.model."
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


def tensors(magnitude="lora_magnitude_vector", prefix=PREFIX, rank=2):
    made = {}
    for module in MODULES:
        made[f"{prefix}{module}.lora_A.weight"] = torch.randn(rank, 5)
        made[f"{prefix}{module}.lora_B.weight"] = torch.randn(4, rank)
        made[f"{prefix}{module}.{magnitude}"] = torch.rand(4).half()
    return made


def read(config=CONFIG, given=None, **options):
    return folder.read_layers(folder.read_config(config), given or tensors(), **options)


@pytest.mark.parametrize("magnitude", ["lora_magnitude_vector", "lora_magnitude_vector.weight"])
@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_the_layers_are_found_by_the_key_of_lora_b(magnitude, prefix):
    given = tensors(magnitude, prefix)
    layers = read(given=given)
    assert set(layers) == {f"{prefix}{module}.lora_B.weight" for module in MODULES}
    layer = layers[f"{prefix}{MODULES[0]}.lora_B.weight"]
    assert (layer.module, layer.rank, layer.scale) == (MODULES[0], 2, 1.5)
    assert layer.magnitude.dtype == torch.float32
    torch.testing.assert_close(layer.magnitude.half(), given[f"{prefix}{MODULES[0]}.{magnitude}"])


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_layer_of_one_output_has_one_magnitude(shape):
    """Such as the gate of a shared expert."""
    given = tensors()
    for module in MODULES:
        given[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(1, 2)
        given[f"{PREFIX}{module}.lora_magnitude_vector"] = torch.rand(shape)
    assert {layer.magnitude.shape for layer in read(given=given).values()} == {(1,)}


def test_patterns_and_rslora_give_rank_and_scale():
    patterns = {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.0.mlp.down_proj": 5}}
    given = tensors()
    given |= {key: one for key, one in tensors(rank=7).items() if "q_proj" in key}
    layers = read(CONFIG | patterns | {"use_rslora": True}, given)
    found = {layer.module: (layer.rank, layer.scale) for layer in layers.values()}
    assert found == {MODULES[0]: (7, 3 / math.sqrt(7)), MODULES[1]: (2, 5 / math.sqrt(2))}


def test_tensors_that_the_model_skips_are_left_out():
    given = tensors() | {f"{PREFIX}mtp.fc.lora_A.weight": torch.ones(2, 5)}
    with pytest.raises(FolderError, match=r"mtp\.fc has no lora_b, magnitude"):
        read(given=given)
    assert len(read(given=given, is_skipped=lambda key: ".mtp." in key)) == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \('lm_head',\)"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"r": 0}, "r is 0"),
        ({"r": None}, "r missing"),
        ({"lora_alpha": math.nan}, "lora_alpha is nan"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields, named):
    with pytest.raises(FolderError, match=named):
        folder.read_config(CONFIG | fields)


def without(key):
    return {name: one for name, one in tensors().items() if not name.endswith(key)}


B, M = f"{PREFIX}{MODULES[0]}.lora_B.weight", f"{PREFIX}{MODULES[0]}.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (without("q_proj.lora_magnitude_vector"), "q_proj has no magnitude"),
        (without("lora_magnitude_vector"), "down_proj has no magnitude"),
        (without("down_proj.lora_A.weight"), "down_proj has no lora_a"),
        ({}, "it has no layer"),
        (tensors() | {M: torch.rand(5)}, r"lora_magnitude_vector is \[5\]; expected \[4\]"),
        (tensors() | {B: torch.rand(4, 3)}, r"lora_B.weight is \[4, 3\]; expected \[out, 2\]"),
        (tensors() | {f"{M}.weight": torch.rand(4)}, "vector are the same tensor; expected one"),
        (tensors() | {f"{PREFIX}lm_head.weight": torch.ones(2, 2)}, "lm_head.weight"),
        (
            tensors() | {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(2, 9)},
            "lora_embedding_A",
        ),
        (
            tensors() | {f"{PREFIX}x.token_adapter.trainable_tokens_delta": torch.ones(2, 9)},
            "trainable_tokens_delta",
        ),
    ],
)
def test_damaged_tensors_are_refused_by_name(given, named):
    with pytest.raises(FolderError, match=named):
        folder.read_layers(folder.read_config(CONFIG), given)


def test_magnitudes_without_use_dora_are_refused():
    with pytest.raises(FolderError, match=r"no use_dora.*\n.*down_proj.lora_magnitude_vector"):
        folder.refuse_magnitudes(tensors())
    folder.refuse_magnitudes(without("lora_magnitude_vector"))
