"""Quantised models that vLLM's CPU build can run: the norms are those of the quantised weights.

Folders of compressed-tensors, written here: weights of 4 bits in groups of 32 inputs, and INT8
weights whose inputs are rounded to INT8 too, which vLLM's CPU build serves without adapters only.
PEFT has the dequantised weights, in fp32.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import vllm_check

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

GROUP = 32
FORMATS = {
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}, None),
    "int8": (
        "int-quantized",
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "token", "dynamic": True},
    ),
}


def quantise(weight, bits, group):
    """Returns the codes and the scales of groups of inputs, bf16, and what they stand for."""
    parts = weight.float().unflatten(1, (-1, group))
    scale = (parts.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).bfloat16()
    codes = (parts / scale.float()).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return codes.flatten(1).to(torch.int8), scale[..., 0], (codes * scale.float()).flatten(1)


def pack(codes):
    """Returns eight codes of 4 bits in each int32, the first in the lowest bits."""
    unsigned = (codes.to(torch.int64) + 8).unflatten(1, (-1, 8))
    packed = (unsigned << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def write(folder, model, kind):
    """Writes the quantised model, and the dequantised one; returns their folders."""
    layout, weights, inputs = FORMATS[kind]
    bits = weights["num_bits"]
    tensors, plain = {}, {}
    for name, weight in load_file(model / "model.safetensors").items():
        plain[name] = tensors[name] = weight
        if name.split(".")[-2] not in vllm_check.PROJECTIONS:
            continue
        group = weights.get("group_size", weight.shape[1])
        codes, scale, plain[name] = quantise(weight, bits, group)
        at = name.removesuffix(".weight")
        del tensors[name]
        tensors[f"{at}.weight_scale"] = scale
        if layout == "pack-quantized":
            tensors[f"{at}.weight_packed"] = pack(codes)
            tensors[f"{at}.weight_shape"] = torch.tensor(weight.shape)
        else:
            tensors[name] = codes
    config = json.loads((model / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True} | weights}
    if inputs:
        group["input_activations"] = {"type": "int", "symmetric": True} | inputs
    quantisation = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    found = []
    for part, given, more in (
        ("quantised", tensors, {"quantization_config": quantisation}),
        ("plain", plain, {}),
    ):
        path = folder / part
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | more))
        shutil.copy(model / "generation_config.json", path)
        given = {name: one.contiguous() for name, one in given.items()}
        save_file(given, path / "model.safetensors", metadata={"format": "pt"})
        found.append(path)
    return found


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Returns a function that serves a model in a format, and its first row."""
    from vllm.distributed import (  # pyright: ignore[reportMissingImports]
        cleanup_dist_env_and_memory,
    )

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(vllm_check, "LENGTHS", (3, 17))
    monkeypatch.setattr(vllm_check, "TOKENS", 6)
    model, adapters = vllm_check._write(tmp_path)

    def serve(kind):
        quantised, plain = write(tmp_path, model, kind)
        rows = vllm_check.served(quantised, adapters, {"enforce_eager": True}, oracle=plain)
        return next(rows)

    yield serve
    cleanup_dist_env_and_memory()


def test_adapters_on_a_quantised_base_answer_as_on_its_dequantised_weights(served):
    found = served("int4")
    assert found["check"]["passed"], found


def test_a_base_whose_weights_vllm_has_dropped_is_refused(served):
    """Without the plugin it is an AttributeError of vLLM."""
    with pytest.raises(ValueError, match=r"dropped the weights of 8 layers, such as .*qkv_proj"):
        served("int8")
