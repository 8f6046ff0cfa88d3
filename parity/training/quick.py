"""A short run in both frameworks, in this process, fp32: seconds on a CPU."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import jax

from parity.faults import Backend
from parity.training import adapter as adapters
from parity.training import jax_side, torch_side
from parity.training.compare import FULL_PRECISION, Difference, compare
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


def quick_check(device: str = "cpu") -> bool:
    """Whether the frameworks train alike in fp32; an error planted in either makes it False."""
    return quick_difference(device).within(FULL_PRECISION)


def quick_difference(device: str = "cpu") -> Difference:
    """Between plain JAX and plain torch; the kernels have their own levels."""
    return difference(train("jax"), train("torch", device))


def train(backend: Backend, device: str = "cpu") -> Run:
    """One framework's half; `device` is torch's."""
    if backend == "torch":
        return torch_side.train(SETTINGS, _base(), _start(), SEED, "eager", device=device)
    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
        return jax_side.train(SETTINGS, _base(), _start(), SEED, "xla")


def difference(ours: Run, theirs: Run) -> Difference:
    """Between JAX's half and torch's."""
    return compare(ours, theirs, _start())


def _start() -> adapters.Adapter:
    return adapters.initial(SETTINGS, _base(), SEED)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="parity-training-")


def _base() -> Path:
    """The tiny base model's folder, made once a process. No adapter is in it, and so no fault."""
    base = Path(_folder().name) / "base"
    if not base.exists():
        with jax.numpy_dtype_promotion("standard"):
            jax_side.make_base(SETTINGS, base)
    return base
