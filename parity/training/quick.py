"""A short run in both frameworks, in this process, fp32: seconds on a CPU."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import jax

from parity.sides import SIDES, Backend
from parity.sides.jax.training import make_base
from parity.training import adapter as adapters
from parity.training.compare import Difference, compare
from parity.training.run import Run
from parity.training.settings import Settings

# The adapter begins away from its base and moves fast, so that norm and magnitude matter at once.
SETTINGS = Settings.tiny(
    dtype="float32",
    steps=16,
    warmup=2,
    learning_rate=2e-3,
    lora_b_deviation=0.02,
    length=48,
    rows=6,
    eval_rows=32,
)
SEED = 1


def quick_difference(device: str = "cpu") -> Difference:
    """Returns how far plain JAX and plain torch are apart; the kernels have their own levels."""
    return difference(train("jax"), train("torch", device))


def train(backend: Backend, device: str = "cpu") -> Run:
    """Trains on one side; `device` is torch's."""
    side = SIDES[backend]
    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
        return side.training.train(SETTINGS, base(), start(), SEED, side.plain, device=device)


def difference(ours: Run, theirs: Run) -> Difference:
    """Returns how far JAX's half and torch's are apart."""
    return compare(ours, theirs, start())


def start() -> adapters.Adapter:
    return adapters.initial(SETTINGS, base(), SEED)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="parity-training-")


def base() -> Path:
    """The tiny base model's folder, made once a process. No adapter is in it, and so no fault."""
    folder = Path(_folder().name) / "base"
    if not folder.exists():
        with jax.numpy_dtype_promotion("standard"):
            make_base(SETTINGS, folder)
    return folder
