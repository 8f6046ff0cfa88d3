"""Byte-level text from files of the Python installation."""

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np


def source_code(size: int) -> np.ndarray:
    """Returns u8[size] of Python code: the modules of the standard library, sorted by name."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return _bytes((module.read_bytes() for module in modules), size)


def english(size: int) -> np.ndarray:
    """Returns u8[size] of English text: the language reference that Python's `help()` shows."""
    return _bytes((topics[name].encode() for name in sorted(topics)), size)


def batch(text: np.ndarray, length: int, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Returns random excerpts of `text`, i32[rows, length + 1]: inputs and the byte after them."""
    starts = rng.integers(0, len(text) - length, size=(rows, 1))
    return text[starts + np.arange(length + 1)].astype(np.int32)


def _bytes(pieces, size: int) -> np.ndarray:
    text = b""
    for piece in pieces:
        text += piece
        if len(text) >= size:
            break
    return np.frombuffer(text[:size], np.uint8)
