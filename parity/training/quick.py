"""A short run in both frameworks, in this process, fp32: seconds on a CPU."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path

import jax

from parity.sides import SIDES, Backend
from parity.sides.jax.training import make_base
from parity.training import adapter as adapters
from parity.training.compare import Difference, Run, compare
from parity.training.settings import Settings

# The adapter begins away from its base and moves fast, so that norm and magnitude matter at once.
_RUN = {"steps": 16, "warmup": 2, "length": 48, "rows": 6, "eval_rows": 32}
SETTINGS = Settings.tiny(dtype="float32", learning_rate=2e-3, lora_b_deviation=0.02, **_RUN)
SEED = 1


def quick_difference(device: str = "cpu") -> Difference:
    """Returns how far plain JAX and plain torch are apart; the kernels have their own levels."""
    return difference(train("jax"), train("torch", device))


def difference(ours: Run, theirs: Run) -> Difference:
    return compare(ours, theirs, start())


def train(backend: Backend, device: str = "cpu") -> Run:
    """Trains on one side; `device` is torch's."""
    side = SIDES[backend]
    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
        return side.training.train(SETTINGS, base(), start(), SEED, side.plain, device=device)


def start() -> adapters.Adapter:
    return adapters.initial(SETTINGS, base(), SEED)


@functools.cache
def base() -> Path:
    """Returns the folder of the tiny base model, made once a process. No adapter is in it, and so
    no fault."""
    temporary = tempfile.TemporaryDirectory(prefix="parity-training-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name) / "base"
    with jax.numpy_dtype_promotion("standard"):
        make_base(SETTINGS, folder)
    return folder
