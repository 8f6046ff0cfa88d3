"""Runs the systems one after the other on the same weights."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping

import jax
import torch

from parity.model import reference
from parity.model.sizes import Run
from parity.model.weights import Result, Weights
from parity.report import Report
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


def execute(
    run: Run, weights: Weights, chosen: Mapping[str, System], report: Report | None = None
) -> tuple[dict[str, Result], dict[str, str]]:
    """Runs every system in turn; one that fails does not stop the others. Returns results and
    errors by system, and adds them to a report."""
    results: dict[str, Result] = {}
    errors: dict[str, str] = {}
    for name, system in chosen.items():
        start = time.perf_counter()
        try:
            results[name] = system(run, weights)
            if weights.tokens.is_cuda:
                torch.cuda.synchronize()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}".strip()[:2000]
            traceback.print_exc()
        seconds = time.perf_counter() - start
        # Both frameworks allocate from one card.
        gc.collect()
        if weights.tokens.is_cuda:
            jax.clear_caches()
            torch.cuda.empty_cache()
        if report is None:
            continue
        print(f"{run.name}, {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        if name in errors:
            report.add(run.name, "result", side=name, ok=False, note=errors[name])
        else:
            facts = {"value": results[name].loss, "seconds": seconds}
            report.add(run.name, "loss", side=name, **facts, run=dataclasses.asdict(run))
    return results, errors
