"""`python -m parity model`: runs all systems, one after the other, on the same weights."""

import argparse
import dataclasses
import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping

import jax
import torch

from parity import command
from parity.model import reference
from parity.model.checks import FP64, FP64_BASE, judge
from parity.model.sizes import Run, runs
from parity.model.weights import Result, Weights, draw
from parity.report import Report
from parity.sides import SIDES, Backend

DTYPES = {"bf16": ("bfloat16",), "fp32": ("float32",), "both": ("bfloat16", "float32")}

System = Callable[[Run, Weights], Result]


def main(options: argparse.Namespace) -> int:
    """Returns 0 if every check of every run passed, else 1."""
    report = command.report(options, "model", ("transformers", "peft"))
    sizes = {"layers": options.layers, "tokens": options.sequence}
    for run in runs(options.device, DTYPES[options.dtype], quick=options.quick, **sizes):
        weights = draw(run, options.device)
        results = execute(report, run, weights, systems(run))
        judge(report, run, results)
        del weights, results
        gc.collect()
    return report.finish()


def systems(run: Run) -> dict[str, System]:
    """Returns the systems that a run compares, by name: a side and its implementation."""
    named: dict[str, System] = {
        FP64_BASE: functools.partial(reference.compute, adapted=False),
        FP64: reference.compute,
    }
    implementations: dict[Backend, tuple] = {"torch": ("base", "peft", *run.torch)}
    implementations["jax"] = ("base", *run.jax)
    for side in implementations:
        decoder = SIDES[side].decoder
        for implementation in implementations[side]:
            name = f"{side} {implementation or ''}".strip()
            named[name] = functools.partial(decoder.compute, implementation=implementation)
    return named


def execute(
    report: Report, run: Run, weights: Weights, chosen: Mapping[str, System]
) -> dict[str, Result]:
    """Runs every system in turn and returns the results. Adds each loss to the report, or the error
    of a system that fails; the other systems still run."""
    results: dict[str, Result] = {}
    cuda = weights.tokens.is_cuda
    for name, system in chosen.items():
        start = time.perf_counter()
        try:
            result = system(run, weights)
            if cuda:
                torch.cuda.synchronize()
        except Exception as error:
            note = f"{type(error).__name__}: {error}".strip()[:2000]
            report.add(run.name, "result", side=name, ok=False, note=note)
            traceback.print_exc()
        else:
            results[name] = result
            facts = {"value": result.loss, "seconds": time.perf_counter() - start}
            report.add(run.name, "loss", side=name, **facts, run=dataclasses.asdict(run))
        seconds = time.perf_counter() - start
        print(f"{run.name}, {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        # Both frameworks allocate from one GPU.
        gc.collect()
        if cuda:
            jax.clear_caches()
            torch.cuda.empty_cache()
    return results
