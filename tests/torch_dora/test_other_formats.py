"""What other programs make of magnitudes, as docs/magnitudes.md says: PEFT itself, and the formulas
and files of programs that need not be here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft.tuners.lora.conversion import save_as_lora
from safetensors.numpy import save_file
from torch import nn

from parity import oracle
from tests.torch_dora.peft_folders import IDS, base, llama, peft_folder
from torch_dora import to_lora
from torch_dora.peft import load_adapter

RNG = np.random.default_rng(0)
# [out, in], [rank, in], [out, rank] and [out].
W, A, B = (RNG.normal(size=shape) for shape in ((6, 8), (2, 8), (6, 2)))
SCALE = 0.75
MAGNITUDE = oracle.norm(W, A, B, SCALE) * (1 + 0.1 * RNG.normal(size=6))
EXACT = oracle.merged_weight(W, A, B, MAGNITUDE, SCALE)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.filterwarnings("ignore:Converting a PEFT adapter to LoRA that is already a LoRA")
def test_peft_s_own_conversion_leaves_the_magnitudes_out(tmp_path: Path) -> None:
    folder, theirs = peft_folder(tmp_path / "dora", llama, target_modules="all-linear")
    expected = logits(theirs)
    save_as_lora(tmp_path / "lora", theirs, rank=16)
    # Their folder is that of a LoRA: nothing in it tells, and it loads as what it is.
    loaded = logits(load_adapter(base(llama), tmp_path / "lora"))
    again = peft.PeftModel.from_pretrained(base(llama), tmp_path / "lora")
    torch.testing.assert_close(loaded, logits(again), rtol=1e-4, atol=1e-5)
    ours, _ = to_lora(load_adapter(base(llama), folder), 16, limit=0.5)
    assert off(loaded, expected) > 3 * off(logits(ours), expected)
    full, _ = to_lora(load_adapter(base(llama), folder), 36, limit=0)
    assert off(logits(full), expected) < 1e-5


def test_a_folder_without_its_magnitudes_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "lora_magnitude_vector", None)
    with pytest.raises(ValueError, match=r"0\.lora_magnitude_vector.* missing"):
        load_adapter(plain(), folder)
    folder = written(tmp_path, "lora_magnitude_vector", MAGNITUDE, use_dora=False)
    with pytest.raises(ValueError, match="is a magnitude; expected none, since use_dora is false"):
        load_adapter(plain(), folder)


@pytest.mark.parametrize(
    ("key", "shape"), [("dora_scale", (6, 1)), ("lora_magnitude_vector.weight", (6, 1))]
)
def test_lycoris_s_magnitudes_per_output_are_dora_s(key: str, shape: Any, tmp_path: Path) -> None:
    model = load_adapter(plain(), written(tmp_path, key, MAGNITUDE.reshape(shape)))
    x = RNG.normal(size=(3, 8))
    assert_computes(model, x, x @ EXACT.T)


def test_lycoris_s_magnitudes_per_input_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "dora_scale", np.linalg.norm(W, axis=0)[None])
    with pytest.raises(ValueError, match=r"LyCORIS's shape.*train with wd_on_output=True"):
        load_adapter(plain(), folder)


def test_mlx_s_arrays_are_peft_s_transposed(tmp_path: Path) -> None:
    """As `mlx_lm` stores and computes them: lora_a [in, rank], lora_b [rank, out], m [out]."""
    lora_a, lora_b, m, scale = A.T, B.T, MAGNITUDE, SCALE
    file = {
        f"0.{name}": value for name, value in (("lora_a", lora_a), ("lora_b", lora_b), ("m", m))
    }
    (tmp_path / "mlx").mkdir()
    save_file(
        {name: np.float32(np.ascontiguousarray(value)) for name, value in file.items()},
        tmp_path / "mlx" / "adapters.safetensors",
    )
    fields = {"fine_tune_type": "dora", "lora_parameters": {"rank": 2, "scale": scale}}
    (tmp_path / "mlx" / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(FileNotFoundError, match=r"MLX's format.*transposed, lora_a is PEFT's"):
        load_adapter(plain(), tmp_path / "mlx")

    x = RNG.normal(size=(3, 8))
    denominator = np.linalg.norm(W + (scale * lora_b.T) @ lora_a.T, axis=1)
    expected = (m / denominator) * (x @ W.T + scale * (x @ lora_a @ lora_b))
    assert_computes(
        load_adapter(plain(), written(tmp_path, "lora_magnitude_vector", m)), x, expected
    )


def test_keras_s_norm_over_the_first_axis_is_per_output(tmp_path: Path) -> None:
    """As KerasHub's DoRADense computes: kernel [in, out], lora_a [in, rank], lora_b [rank, out]."""
    kernel = W.T + SCALE * A.T @ B.T
    expected = kernel / np.linalg.norm(kernel, axis=0, keepdims=True) * MAGNITUDE
    x = RNG.normal(size=(3, 8))
    folder = written(tmp_path, "lora_magnitude_vector", MAGNITUDE)
    assert_computes(load_adapter(plain(), folder), x, x @ expected)


def comfyui(dora_scale: np.ndarray) -> np.ndarray:
    """Returns the weight that ComfyUI computes from a dora_scale [out, 1]: it divides by the norm
    of the base weight alone."""
    norm = np.linalg.norm(W, axis=1, keepdims=True) + np.finfo(np.float32).eps
    return (W + SCALE * B @ A) * (dora_scale / norm)


def test_comfyui_divides_by_another_norm() -> None:
    assert np.linalg.norm(comfyui(MAGNITUDE[:, None]) - EXACT) > 0.1 * np.linalg.norm(EXACT)
    # These magnitudes make it compute the same.
    stored = MAGNITUDE * np.linalg.norm(W, axis=1) / oracle.norm(W, A, B, SCALE)
    np.testing.assert_allclose(comfyui(stored[:, None]), EXACT, rtol=1e-6)


def plain() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 6, bias=False)).double()
    model[0].weight.data = torch.tensor(W)
    return model


def written(folder: Path, key: str, magnitude: np.ndarray | None, *, use_dora: bool = True) -> Path:
    """Returns a PEFT folder with this adapter, its magnitude under a key of another tool's."""
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2 * SCALE, "target_modules": ["0"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"use_dora": use_dora}))
    tensors = {"lora_A.weight": A, "lora_B.weight": B}
    tensors |= {} if magnitude is None else {key: magnitude}
    save_file(
        {f"base_model.model.0.{name}": np.ascontiguousarray(one) for name, one in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def assert_computes(model: Any, x: np.ndarray, expected: np.ndarray) -> None:
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.tensor(x)).numpy(), expected, rtol=1e-9)
