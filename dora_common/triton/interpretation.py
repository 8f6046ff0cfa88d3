"""Runs kernels on NumPy arrays, in Triton's interpreter (TRITON_INTERPRET=1)."""

from typing import Any

import numpy as np


class HostArray:
    """A NumPy array as the interpreter takes a tensor: a place in the host's memory, which it does
    not copy."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array, self.dtype = array, dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def storage(self, *_: Any, **__: Any) -> "HostArray":
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = storage_offset = size = stride = storage
