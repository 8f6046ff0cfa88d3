"""Runs the systems one after the other on the same weights."""

from __future__ import annotations

import functools
import gc
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import torch

from parity.model import reference
from parity.model.sizes import Run
from parity.model.weights import Result, Weights
from parity.sides import SIDES, Backend

FP64, FP64_BASE, PEFT = "fp64", "fp64 base", "torch peft"
BASES = ("torch base", "jax base")

System = Callable[[Run, Weights], Result]


def side_of(name: str) -> str:
    """Returns "jax", "torch" or "fp64", of a system's name."""
    return name.partition(" ")[0]


def systems(run: Run) -> dict[str, System]:
    """Returns all that a run compares, by name: a side and its implementation."""
    found: dict[str, System] = {
        FP64_BASE: functools.partial(reference.compute, adapted=False),
        FP64: reference.compute,
    }
    chosen: dict[Backend, tuple] = {"torch": ("base", "peft", *run.torch)}
    chosen["jax"] = ("base", *run.jax)
    for side, implementations in chosen.items():
        decoder = SIDES[side].decoder
        for implementation in implementations:
            name = f"{side} {implementation or ''}".strip()
            found[name] = functools.partial(decoder.compute, implementation=implementation)
    return found


@dataclass
class Executed:
    """Holds, by system, its result or error, seconds with compilation, and free GiB after it."""

    results: dict[str, Result] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    free: dict[str, float | None] = field(default_factory=dict)


def execute(
    run: Run,
    weights: Weights,
    chosen: Mapping[str, System],
    say: Callable[[str], None] = lambda line: None,
) -> Executed:
    """Runs every system in turn; one that fails does not stop the others."""
    executed = Executed()
    for name, system in chosen.items():
        start = time.perf_counter()
        try:
            executed.results[name] = system(run, weights)
            if weights.tokens.is_cuda:
                torch.cuda.synchronize()
        except Exception as error:
            executed.errors[name] = f"{type(error).__name__}: {error}".strip()[:2000]
            say(traceback.format_exc())
        executed.seconds[name] = time.perf_counter() - start
        # Both frameworks allocate from one card.
        gc.collect()
        if weights.tokens.is_cuda:
            jax.clear_caches()
            torch.cuda.empty_cache()
        executed.free[name] = free = free_memory(weights.tokens.device)
        done = "failed" if name in executed.errors else f"loss {executed.results[name].loss:.6f}"
        memory = "" if free is None else f", {free:.1f} GiB free"
        say(f"  {name}: {done}, {executed.seconds[name]:.1f} s{memory}")
    return executed


def free_memory(device: torch.device) -> float | None:
    """Returns the GiB of the card that nobody has, or None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] / 2**30 if device.type == "cuda" else None
