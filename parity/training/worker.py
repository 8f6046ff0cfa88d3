"""One run, in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from parity.sides import SIDES
from parity.training import adapter as adapters
from parity.training.settings import Settings
from parity.training.variants import Job

PROGRESS_LINES = 8


def work(settings: Settings, device: str, base: Path, job: Job | None, result: Path) -> None:
    """Trains, or makes the base model's folder if `job` is None; `result` appears when complete."""
    partial = result.with_suffix(f".partial{result.suffix}")
    if job is None:
        _set_up_jax(device)
        from parity.sides.jax.training import make_base

        losses = make_base(settings, base, _progress("base", settings.base_steps))
        partial.write_text(json.dumps(losses))
    else:
        seed, variant = job
        start = adapters.initial(settings, base, seed)
        if variant.perturbed:
            start = adapters.one_ulp_off(start, seed)
        if variant.framework == "jax":
            _set_up_jax(device)
        else:
            import torch

            torch.backends.cuda.matmul.allow_tf32 = False
        progress = _progress(f"seed {seed}, {variant.label}", settings.steps)
        train = SIDES[variant.framework].training.train
        run = train(settings, base, start, seed, variant.implementation, progress, device)
        run.save(partial)
    partial.rename(result)


def _set_up_jax(device: str) -> None:
    import jax

    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        raise RuntimeError("--device cuda: jax sees no GPU; pip install 'jax-dora[cuda13]'")


def _progress(label: str, steps: int) -> Callable[[int, float], None]:
    every = max(1, steps // PROGRESS_LINES)
    told = 0

    def progress(step: int, loss: float) -> None:
        nonlocal told
        if step // every > told or step == steps:
            told = step // every
            print(f"{label}: step {step} of {steps}, loss {loss:.4f}", file=sys.stderr, flush=True)

    return progress
