"""`python -m parity training`: every seed and variant in its own process, then the verdicts."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from parity import command
from parity.environment import choose_device
from parity.report import Report
from parity.training import adapter as adapters
from parity.training import worker
from parity.training.compare import FULL_PRECISION, PAPER, Run, compare
from parity.training.settings import Settings
from parity.training.text import text
from parity.training.variants import NATIVE_ONLY, PAIRINGS, PEFT, VARIANTS, Job, Variant

SEEDS = (1, 2, 3)
# Of the first seed's losses the report has every so many steps'; statistics are over all.
CURVE_EVERY = 10
QUANTITIES = ("mean |Δloss|", "worst |Δloss|", "final evaluation |Δ|")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(
        "training",
        "Trains the same DoRA adapter in JAX and in torch, from the same initial state on the same "
        "batches, and compares losses, gradient norms and adapters. --quick: a tiny model, one "
        "seed, few steps.",
    )
    parser.add_argument("--steps", type=int, help="of every run; 2000, or 40 with --quick")
    parser.add_argument("--seeds", type=int, nargs="+", help="default 1 2 3, or 1 with --quick")
    only = "only variants whose name, such as 'torch triton', has this regular expression"
    parser.add_argument("--variant", default="", type=command.expression, help=only)
    at_a_time = "runs at a time; default 6 on a GPU and 1 on a CPU"
    parser.add_argument("--jobs", type=command.positive, help=at_a_time)
    kept = "folder for runs, none of which is repeated that is there; a temporary one by default"
    parser.add_argument("--work", type=Path, help=kept)
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 2:
        parser.error(f"--steps is {options.steps}; expected at least 2")
    options.seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if runs came further apart than `parity.tolerances` allows."""
    options = parse(arguments)
    # The workers do the work; this process holds nothing on the card.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    device = choose_device(options.device)
    settings = Settings.tiny() if options.quick else Settings()
    if options.steps:
        settings = dataclasses.replace(settings, steps=options.steps)
    jobs = _jobs(options, device)
    if not jobs:
        names = ", ".join(variant.label for variant in VARIANTS)
        sys.exit(f"no variant on {device} matches --variant {options.variant!r}; expected {names}")
    facts = {"settings": dataclasses.asdict(settings), "text": text().facts()}
    packages = ("optax", "transformers", "peft")
    report = command.report(options, device, "training", packages, **facts)
    with tempfile.TemporaryDirectory(prefix="parity-training-") as temporary:
        work = (options.work or Path(temporary)) / _digest(settings, device)
        work.mkdir(parents=True, exist_ok=True)
        curves, lock = options.seeds[0], threading.Lock()

        def done(job: Job, problem: str) -> None:
            with lock:
                if problem:
                    report.add(f"seed {job[0]}", "run", side=job[1].label, ok=False, note=problem)
                else:
                    write_run(report, job, Run.load(_file(work, job)), curve=job[0] == curves)

        _run_all(jobs, settings, device, work, options.jobs, done)
        for seed in options.seeds:
            files = {v: _file(work, (s, v)) for s, v in jobs if s == seed}
            # A seed's at a time: an adapter has tens of millions of numbers.
            runs = {v: Run.load(file) for v, file in files.items() if file.exists()}
            start = adapters.initial(settings, work / "base", seed)
            write_pairs(report, settings, seed, runs, start)
    return report.finish()


def write_run(report: Report, job: Job, run: Run, *, curve: bool) -> None:
    """Adds one run's losses to the report; with `curve`, those of its steps."""
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
    for pairing in PAIRINGS:
        if pairing.one not in runs or pairing.other not in runs:
            continue
        found = compare(runs[pairing.one], runs[pairing.other], start)
        report.add(
            f"seed {seed}",
            QUANTITIES,
            side=f"{pairing.one.label}, {pairing.other.label}",
            kind=pairing.kind,
            error=found.figures,
            bound=limits if pairing.judged else None,
            ok=found.verdicts(limits) if pairing.judged else None,
            worst_step=found.worst_step,
            gradient_norm_median=found.gradient_norm_median,
            gradient_norm_worst=found.gradient_norm_worst,
            drift=found.drift,
            travelled=found.travelled,
        )


def _jobs(options: argparse.Namespace, device: str) -> list[Job]:
    """Returns all runs, those that take longest first."""
    return [
        (seed, variant)
        for variant in VARIANTS
        for seed in (options.seeds[:1] if variant.once else options.seeds)
        if (device == "cuda" or variant not in NATIVE_ONLY)
        and (variant != PEFT or find_spec("peft") is not None)
        and re.search(options.variant, variant.label)
    ]


def _digest(settings: Settings, device: str) -> str:
    """Names the runs that these settings on this text give."""
    facts = json.dumps([dataclasses.asdict(settings), text().facts(), device], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _run_all(
    jobs: list[Job],
    settings: Settings,
    device: str,
    work: Path,
    at_a_time: int | None,
    done: Callable[[Job, str], None],
) -> None:
    """Runs every job in a process of its own; calls `done` with it and what went wrong, or ""."""
    at_a_time = at_a_time or (6 if device == "cuda" else 1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if device == "cuda":
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / at_a_time:.3f}"
    base, spawn = work / "base", multiprocessing.get_context("spawn")

    def run(job: Job | None) -> None:
        file = work / "base.json" if job is None else _file(work, job)
        problem = ""
        if not file.exists():
            # A process each: what one leaves behind, or breaks, is no other's.
            with ProcessPoolExecutor(1, spawn) as process:
                try:
                    process.submit(worker.work, settings, device, base, job, file).result()
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
        if job is not None:
            done(job, problem)
        elif problem:
            sys.exit(f"the base model could not be made: {problem}")

    run(None)
    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(run, jobs))


def _file(work: Path, job: Job) -> Path:
    seed, variant = job
    return work / f"{seed} {variant.label.replace(',', '')}.run".replace(" ", "_")
