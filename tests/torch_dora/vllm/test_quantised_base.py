"""Quantised models that vLLM's CPU build can run: the norms are those of the quantised weights.

Folders written here: weights of 4 bits in groups of 32 inputs, as compressed-tensors, GPTQ and AWQ
store them; FP8 weights whose inputs are rounded to FP8; and INT8 weights with such inputs, which
vLLM's CPU build serves without adapters only. PEFT has the dequantised weights, in fp32.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import vllm_check
from tests.torch_dora.vllm.test_base_weight import LARGEST

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

GROUP = 32


def compressed_tensors(layout, weights, inputs=None):
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True} | weights}
    if inputs:
        group["input_activations"] = {"type": "int", "symmetric": True} | inputs
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


FOUR_BITS = {"bits": 4, "group_size": GROUP}
CONFIGURATIONS = {
    "int4": compressed_tensors(
        "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    ),
    "int8": compressed_tensors(
        "int-quantized",
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "token", "dynamic": True},
    ),
    "gptq": {"quant_method": "gptq", "desc_act": False, "sym": True} | FOUR_BITS,
    "awq": {"quant_method": "awq", "zero_point": True} | FOUR_BITS,
    "fp8": compressed_tensors(
        "float-quantized",
        {"num_bits": 8, "strategy": "channel", "type": "float"},
        {"num_bits": 8, "strategy": "token", "dynamic": True, "type": "float"},
    ),
}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def quantise(weight, bits, group):
    """Returns the codes and the scales of groups of inputs, bf16, and what they stand for."""
    parts = weight.float().unflatten(1, (-1, group))
    scale = (parts.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).bfloat16()
    codes = (parts / scale.float()).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return codes.flatten(1).to(torch.int8), scale[..., 0], (codes * scale.float()).flatten(1)


def pack(codes, order=range(8)):
    """Returns eight codes of 4 bits in each int32, the first in the lowest bits."""
    unsigned = (codes.to(torch.int64) + 8).unflatten(1, (-1, 8))[..., list(order)]
    packed = (unsigned << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def stored(kind, weight):
    """Returns the tensors that stand for a weight [out, in], and what they stand for, in fp32."""
    if kind == "fp8":
        scale = weight.float().abs().amax(1, keepdim=True) / LARGEST
        codes = (weight.float() / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale
    group = weight.shape[1] if kind == "int8" else GROUP
    codes, scale, plain = quantise(weight, 8 if kind == "int8" else 4, group)
    if kind == "int8":
        return {"weight": codes, "weight_scale": scale}, plain
    if kind == "int4":
        shape = torch.tensor(weight.shape)
        packed = {"weight_packed": pack(codes), "weight_shape": shape, "weight_scale": scale}
        return packed, plain
    zeros = torch.zeros(scale.shape[::-1])  # [groups, out]
    if kind == "awq":
        packed = {"qweight": pack(codes.T, AWQ_ORDER), "qzeros": pack(zeros)}
    else:  # GPTQ stores zero points less one.
        packed = {"qweight": pack(codes).T, "qzeros": pack(zeros - 1)}
        packed["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return packed | {"scales": scale.T}, plain


def write(folder, model, kind):
    """Writes the quantised model, and the dequantised one; returns their folders."""
    tensors, plain = {}, {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.split(".")[-2] not in vllm_check.PROJECTIONS:
            plain[name] = tensors[name] = weight
            continue
        parts, plain[name] = stored(kind, weight)
        at = name.removesuffix("weight")
        tensors |= {at + part: one for part, one in parts.items()}
    config = json.loads((model / "config.json").read_text())
    found = []
    for part, given, more in (
        ("quantised", tensors, {"quantization_config": CONFIGURATIONS[kind]}),
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
    monkeypatch.setattr(vllm_check, "TOKENS", 16)
    model, adapters = vllm_check._write(tmp_path)

    def serve(kind):
        if kind == "fp8":  # A rounded input is off by up to 6 %, and PEFT's are not rounded.
            monkeypatch.setattr(vllm_check, "BOUND", 2 * vllm_check.BOUND)
        quantised, plain = write(tmp_path, model, kind)
        rows = vllm_check.served(quantised, adapters, {"enforce_eager": True}, oracle=plain)
        row = next(rows)
        del row["answers"]
        return row

    yield serve
    cleanup_dist_env_and_memory()


NEEDS_AVX512 = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="vLLM's CPU build multiplies weights of 4 bits by AVX-512 instructions alone",
)
IN_4_BITS = [pytest.param(kind, marks=NEEDS_AVX512) for kind in ("int4", "gptq", "awq")]


@pytest.mark.parametrize("kind", [*IN_4_BITS, "fp8"])
def test_adapters_on_a_quantised_base_answer_as_on_its_dequantised_weights(served, kind):
    found = served(kind)
    assert found["check"]["passed"], found


def test_a_base_whose_weights_vllm_has_dropped_is_refused(served, monkeypatch):
    """As on a CPU without AMX. Without the plugin it is an AttributeError of vLLM."""
    kernels = "vllm.model_executor.kernels.linear.scaled_mm.cpu"
    monkeypatch.setattr(f"{kernels}.check_cpu_sgl_kernel", lambda *sizes: False)
    with pytest.raises(ValueError, match=r"dropped the weights of 8 layers, such as .*qkv_proj"):
        served("int8")
