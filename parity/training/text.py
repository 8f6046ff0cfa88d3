"""The text of the training runs, which every machine has: the bytes of Python's standard library.

It is split by files: top-level modules train the base model, modules of packages train the adapter,
and every tenth module of packages is held out.
"""

import functools
import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Tables, third-party code, and packages that some distributions do not install.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "lib2to3"}
EXCLUDED |= {"ensurepip", "turtledemo", "tkinter", "__pycache__", "_pyrepl"}
HELD_OUT_EVERY = 10


class Text(NamedTuple):
    base: np.ndarray  # u8[…], for the base model
    adapter: np.ndarray  # u8[…], for the adapter
    held_out: np.ndarray  # u8[…], for evaluation

    def facts(self) -> dict[str, str]:
        """Returns the size and digest of every part: they depend on the Python version."""
        return {
            name: f"{len(part)} bytes, sha256 {hashlib.sha256(part.tobytes()).hexdigest()[:16]}"
            for name, part in self._asdict().items()
        }


@functools.cache
def text() -> Text:
    root = Path(sysconfig.get_path("stdlib"))
    modules = sorted(root.glob("*.py"))
    packaged = sorted(
        file
        for file in root.glob("*/**/*.py")
        if not EXCLUDED & set(file.relative_to(root).parts)
        and not file.relative_to(root).parts[0].startswith(("config-", "lib-dynload"))
    )
    held_out = packaged[::HELD_OUT_EVERY]
    training = [file for file in packaged if file not in set(held_out)]
    return Text(_bytes(modules), _bytes(training), _bytes(held_out))


def starts(part: np.ndarray, shape: tuple[int, ...], length: int, seed: int) -> np.ndarray:
    """Draws i32[shape]: the start positions of rows of length + 1 bytes in `part`."""
    rng = np.random.default_rng((17, seed))
    return rng.integers(0, len(part) - length, shape).astype(np.int32)


def even_starts(part: np.ndarray, rows: int, length: int) -> np.ndarray:
    """Returns i32[rows]: start positions spread evenly over `part`."""
    return np.linspace(0, len(part) - length - 1, rows).astype(np.int32)


def _bytes(files: list[Path]) -> np.ndarray:
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
