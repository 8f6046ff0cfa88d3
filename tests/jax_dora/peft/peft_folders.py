"""Adapters of PEFT's on decoders, and folders of adapters, their tensors as NumPy has them."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from safetensors.numpy import load_file, save_file

TENSORS = "adapter_model.safetensors"


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / TENSORS)


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


def rewritten(
    folder: Path, rename: Any = lambda key: key, change: Any = lambda array: array
) -> None:
    tensors = {rename(key): change(array) for key, array in tensors_of(folder).items()}
    tensors = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
    save_file(tensors, folder / TENSORS)


def peft_model(base: Any, seed: int = 1, **setting: Any) -> Any:
    """Returns a decoder with an adapter of PEFT's: lora_B away from zero, and magnitudes away from
    their norms."""
    model: Any = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **setting))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.normal_(0, 0.05)
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    return model.eval()
