"""`python -m parity training`: every seed and variant in its own process, then the verdicts."""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from parity import command
from parity.environment import choose_device
from parity.report import Report
from parity.sides import SIDES, Backend
from parity.training import adapter as adapters
from parity.training.compare import FULL_PRECISION, PAPER, Run, compare
from parity.training.settings import Settings
from parity.training.text import text


class Variant(NamedTuple):
    """One implementation of the run.

    Attributes:
      framework: "jax" or "torch".
      implementation: of `dora_linear` there, or "peft": Hugging Face's DoRA in our place.
      perturbed: the initial lora_a is off by one unit in the last place.
    """

    framework: Backend
    implementation: str
    perturbed: bool = False

    @property
    def label(self) -> str:
        return f"{self.framework} {self.implementation}" + ", one ulp off" * self.perturbed

    @property
    def once(self) -> bool:
        """Runs with the first seed alone: what it is compared with is not judged."""
        return self.perturbed or self.implementation == "peft"


Job = tuple[int, Variant]  # with its seed


MOSAIC, XLA = Variant("jax", "mosaic"), Variant("jax", "xla")
TRITON, EAGER = Variant("torch", "triton"), Variant("torch", "eager")
XLA_OFF, EAGER_OFF = XLA._replace(perturbed=True), EAGER._replace(perturbed=True)
PEFT = Variant("torch", "peft")

# Those that take longest first.
VARIANTS = (PEFT, TRITON, EAGER, EAGER_OFF, MOSAIC, XLA, XLA_OFF)
# Interpreted kernels would take days.
NATIVE_ONLY = (MOSAIC, TRITON)

# Those that must train alike, and those that are compared and not judged.
JUDGED = {
    "across frameworks": [(MOSAIC, TRITON), (XLA, EAGER)],
    "fused against plain": [(MOSAIC, XLA), (TRITON, EAGER)],
}
BESIDE = {
    # What a difference in the last place of the initial adapter grows to by itself.
    "rounding floor": [(XLA, XLA_OFF), (EAGER, EAGER_OFF)],
    # PEFT multiplies its fp32 adapters in fp32.
    "beside PEFT": [(XLA, PEFT), (EAGER, PEFT)],
}

SEEDS = (1, 2, 3)
# Of the first seed's losses the report has every so many steps'; statistics are over all.
CURVE_EVERY = 10
QUANTITIES = ("mean |Δloss|", "worst |Δloss|", "final evaluation |Δ|")


def main(options: argparse.Namespace) -> int:
    """Returns 1 if runs came further apart than `parity.tolerances` allows."""
    # For the processes that do the work.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    device = options.device
    options.seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
    at_a_time = options.jobs or (6 if device == "cuda" else 1)
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / at_a_time:.3f}"
    settings = Settings.tiny() if options.quick else Settings()
    if options.steps:
        settings = dataclasses.replace(settings, steps=options.steps)
    jobs = _jobs(options, device)
    if not jobs:
        names = ", ".join(variant.label for variant in VARIANTS)
        sys.exit(f"no variant on {device} matches --variant {options.variant!r}; expected {names}")
    facts = {"settings": dataclasses.asdict(settings), "text": text().facts()}
    packages = ("optax", "transformers", "peft")
    report = command.report(options, "training", packages, **facts)
    found: dict[Job, Run] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_a_time) as pool:
        base = Path(folder)
        _alone(_make_base, settings, device, base)

        # What a run leaves behind, or breaks, is no other's.
        runs = {job: pool.submit(_alone, _train, settings, device, base, job) for job in jobs}
        for job, run in runs.items():
            if error := run.exception():
                note = f"{type(error).__name__}: {error}"
                report.add(f"seed {job[0]}", "run", side=job[1].label, ok=False, note=note)
            else:
                found[job] = run.result()
                write_run(report, job, found[job], curve=job[0] == options.seeds[0])
        for seed in options.seeds:
            its = {variant: run for (of, variant), run in found.items() if of == seed}
            write_pairs(report, settings, seed, its, adapters.initial(settings, base, seed))
    return report.finish()


def write_run(report: Report, job: Job, run: Run, *, curve: bool) -> None:
    """Adds one run's losses to the report; with `curve`, those of its steps."""
    told = f"seed {job[0]}, {job[1].label}: {len(run.losses)} steps, {run.seconds:.0f} s"
    print(told, file=sys.stderr, flush=True)
    losses = {"curve": {"every": CURVE_EVERY, "loss": run.losses[::CURVE_EVERY].tolist()}}
    report.add(
        f"seed {job[0]}",
        "run",
        side=job[1].label,
        seconds=round(run.seconds, 1),
        first_loss=float(run.losses[0]),
        last_losses=float(run.losses[-100:].mean()),
        eval_before=run.eval_before,
        eval_after=run.eval_after,
        **(losses if curve else {}),
    )


def write_pairs(
    report: Report, settings: Settings, seed: int, runs: dict[Variant, Run], start: adapters.Adapter
) -> None:
    """Adds what every pair of one seed's runs came to, from the initial adapter `start`."""
    limits = FULL_PRECISION if settings.dtype == "float32" else PAPER
    pairs = [(kind, *pair) for kind, pairs in (JUDGED | BESIDE).items() for pair in pairs]
    for kind, one, other in pairs:
        if one in runs and other in runs:
            found = compare(runs[one], runs[other], start)
            facts = dataclasses.asdict(found)
            report.add(
                f"seed {seed}",
                QUANTITIES,
                side=f"{one.label}, {other.label}",
                kind=kind,
                error=facts.pop("figures"),
                bound=limits if kind in JUDGED else None,
                ok=found.verdicts(limits) if kind in JUDGED else None,
                **facts,
            )


def _jobs(options: argparse.Namespace, device: str) -> list[Job]:
    """Returns all runs, those that take longest first."""
    return [
        (seed, variant)
        for variant in VARIANTS
        if device == "cuda" or variant not in NATIVE_ONLY
        if re.search(options.variant, variant.label)
        for seed in (options.seeds[:1] if variant.once else options.seeds)
    ]


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a function that is called in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def _make_base(settings: Settings, device: str, base: Path) -> None:
    choose_device(device)
    from parity.sides.jax.training import make_base

    make_base(settings, base)


def _train(settings: Settings, device: str, base: Path, job: Job) -> Run:
    seed, variant = job
    start = adapters.initial(settings, base, seed)
    if variant.perturbed:
        start = adapters.one_ulp_off(start, seed)
    choose_device(device)
    train = SIDES[variant.framework].training.train
    return train(settings, base, start, seed, variant.implementation, device)
