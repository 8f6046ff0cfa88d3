"""A short run in both frameworks, in this process, fp32: seconds on a CPU."""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Mapping
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


def train(backend: Backend) -> Run:
    """Trains plainly on one side; the kernels have their own levels."""
    side = SIDES[backend]
    start = adapters.initial(SETTINGS, base(), SEED)
    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
        return side.training.train(SETTINGS, base(), start, SEED, side.plain)


def difference(runs: Mapping[Backend, Run]) -> Difference:
    """Returns how far both sides' runs are apart."""
    return compare(runs["jax"], runs["torch"], adapters.initial(SETTINGS, base(), SEED))


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
