"""`python -m parity training`: runs every seed and variant in its own process, then compares the
runs."""

import argparse
import dataclasses
import functools
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
from parity.training.difference import FULL_PRECISION, PAPER, Run, compare
from parity.training.settings import Settings
from parity.training.text import text


class Variant(NamedTuple):
    """One implementation of the training run.

    Attributes:
      framework: "jax" or "torch".
      implementation: of `dora_linear` there, or "peft" for Hugging Face's DoRA instead of ours.
      perturbed: whether the initial lora_a is off by one unit in the last place.
    """

    framework: Backend
    implementation: str
    perturbed: bool = False

    @property
    def label(self) -> str:
        return f"{self.framework} {self.implementation}" + ", one ulp off" * self.perturbed

    @property
    def first_seed_only(self) -> bool:
        """Returns whether only the first seed is run: comparisons with it are not judged."""
        return self.perturbed or self.implementation == "peft"


Job = tuple[int, Variant]  # (seed, variant)


MOSAIC, XLA = Variant("jax", "mosaic"), Variant("jax", "xla")
TRITON, EAGER = Variant("torch", "triton"), Variant("torch", "eager")
XLA_OFF, EAGER_OFF = XLA._replace(perturbed=True), EAGER._replace(perturbed=True)
PEFT = Variant("torch", "peft")

# The slowest first.
VARIANTS = (PEFT, TRITON, EAGER, EAGER_OFF, MOSAIC, XLA, XLA_OFF)
# Interpreted, these kernels would take days.
NATIVE_ONLY = (MOSAIC, TRITON)

# Pairs of variants that must train alike, and pairs that are compared but not judged.
JUDGED = {
    "across frameworks": [(MOSAIC, TRITON), (XLA, EAGER)],
    "fused against plain": [(MOSAIC, XLA), (TRITON, EAGER)],
}
NOT_JUDGED = {
    # The effect of a difference in the last place of the initial adapter.
    "rounding floor": [(XLA, XLA_OFF), (EAGER, EAGER_OFF)],
    # PEFT multiplies its fp32 adapters in fp32.
    "beside PEFT": [(XLA, PEFT), (EAGER, PEFT)],
}

SEEDS = (1, 2, 3)
# The report has the loss of every 10th step of the first seed; statistics use all steps.
CURVE_EVERY = 10
QUANTITIES = ("mean |Δloss|", "worst |Δloss|", "final evaluation |Δ|")


def main(options: argparse.Namespace) -> int:
    """Returns 1 if runs differ by more than `parity.tolerances` allows, else 0."""
    # These variables are for the new processes.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    device = options.device
    options.seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
    parallel = options.jobs or (6 if device == "cuda" else 1)
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / parallel:.3f}"
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
    results: dict[Job, Run] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(parallel) as pool:
        base = Path(folder)
        _in_new_process(_make_base, settings, device, base)

        # Separate processes isolate the runs from each other.
        run_job = functools.partial(_in_new_process, _train, settings, device, base)
        runs = {job: pool.submit(run_job, job) for job in jobs}
        for job, run in runs.items():
            if error := run.exception():
                note = f"{type(error).__name__}: {error}"
                report.add(f"seed {job[0]}", "run", side=job[1].label, ok=False, note=note)
            else:
                results[job] = run.result()
                write_run(report, job, results[job], curve=job[0] == options.seeds[0])
        for seed in options.seeds:
            runs_of_seed = {job[1]: run for job, run in results.items() if job[0] == seed}
            start = adapters.initial(settings, base, seed)
            write_pairs(report, settings, seed, runs_of_seed, start)
    return report.finish()


def write_run(report: Report, job: Job, run: Run, *, curve: bool) -> None:
    """Adds one run's losses to the report; with `curve`, also the loss of every few steps."""
    message = f"seed {job[0]}, {job[1].label}: {len(run.losses)} steps, {run.seconds:.0f} s"
    print(message, file=sys.stderr, flush=True)
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
    """Adds the comparison of every pair of one seed's runs, which started from the adapter
    `start`."""
    limits = FULL_PRECISION if settings.dtype == "float32" else PAPER
    pairs = [(kind, *pair) for kind, pairs in (JUDGED | NOT_JUDGED).items() for pair in pairs]
    for kind, first, second in pairs:
        if first in runs and second in runs:
            difference = compare(runs[first], runs[second], start)
            facts = dataclasses.asdict(difference)
            report.add(
                f"seed {seed}",
                QUANTITIES,
                side=f"{first.label}, {second.label}",
                kind=kind,
                error=facts.pop("figures"),
                bound=limits if kind in JUDGED else None,
                ok=difference.verdicts(limits) if kind in JUDGED else None,
                **facts,
            )


def _jobs(options: argparse.Namespace, device: str) -> list[Job]:
    """Returns all runs, the slowest first."""
    return [
        (seed, variant)
        for variant in VARIANTS
        if device == "cuda" or variant not in NATIVE_ONLY
        if re.search(options.variant, variant.label)
        for seed in (options.seeds[:1] if variant.first_seed_only else options.seeds)
    ]


def _in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a new process and returns its result."""
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
