"""Folders of adapters, their tensors as NumPy has them."""

from pathlib import Path
from typing import Any

import numpy as np
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
