"""`python -m parity training`: every seed and variant in its own process, then the verdicts."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parity.training.settings import Settings
from parity.training.text import text
from parity.training.variants import NATIVE_ONLY, PEFT, VARIANTS, Variant

ROOT = Path(__file__).parents[2]
Job = tuple[int, Variant]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parity training",
        description="Trains the same DoRA adapter in JAX and in torch, from the same initial state "
        "on the same batches, and compares losses, gradient norms and adapters.",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=int, help="of every run; 2000, or 40 with --quick")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="report folder; default parity/reports/<device>")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one seed, few steps")
    parser.add_argument("--commit", help="to record in the report, where there is no git checkout")
    parser.add_argument(
        "--variant",
        default="",
        help="only variants whose name, such as 'torch triton', has this regular expression",
    )
    parser.add_argument(
        "--jobs", type=int, help="runs at a time; default 6 on a GPU and 1 on a CPU"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="folder for the runs themselves: a run that is there already is not repeated, so that "
        "an interrupted command can be given again; a temporary folder if not given",
    )
    options = parser.parse_args(arguments)
    try:
        re.compile(options.variant)
    except re.error as error:
        parser.error(f"--variant is {options.variant!r}, no regular expression: {error}")
    if options.steps is not None and options.steps < 2:
        parser.error(f"--steps is {options.steps}; expected at least 2")
    if options.quick and options.seeds == [1, 2, 3]:
        options.seeds = [1]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    from parity.__main__ import set_up

    options = parse(arguments)
    # The workers do the work; this process holds nothing on the card.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    device = set_up(options.device)
    settings = Settings.tiny() if options.quick else Settings()
    if options.steps:
        settings = dataclasses.replace(settings, steps=options.steps)
    jobs = _jobs(options, device)
    if not jobs:
        names = ", ".join(variant.label for variant in VARIANTS)
        sys.exit(f"no variant on {device} matches --variant {options.variant!r}; expected {names}")

    folder = options.out or ROOT / "parity" / "reports" / device
    with tempfile.TemporaryDirectory(prefix="parity-training-") as temporary:
        work = (options.work or Path(temporary)) / _digest(settings, device)
        work.mkdir(parents=True, exist_ok=True)
        files, failures = _run_all(jobs, settings, device, work, options.jobs)

        from parity.training.report import Report

        report = Report.of(settings, device, options.commit, work / "base", files, failures)
    report.write(folder)
    print(report.summary())
    print(f"written: {folder / 'training.md'}, {folder / 'training.json'}")
    return 0 if report.passed else 1


def _jobs(options: argparse.Namespace, device: str) -> list[Job]:
    """Those that take longest first."""
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
    jobs: list[Job], settings: Settings, device: str, work: Path, at_a_time: int | None
) -> tuple[dict[Job, Path], list[str]]:
    """The files that the jobs made, and what is wrong with the jobs that made none."""
    base: dict[str, Any] = {
        "settings": dataclasses.asdict(settings),
        "device": device,
        "base": str(work / "base"),
    }
    at_a_time = at_a_time or (6 if device == "cuda" else 1)
    made = work / "base.json"
    if not made.exists():
        problem = _work(base | {"variant": None, "result": str(made)}, device, 1)
        if problem:
            sys.exit(f"the base model could not be made: {problem}")

    def run(job: Job) -> str:
        seed, variant = job
        result = _file(work, job)
        if result.exists():
            return ""
        # Renamed when complete, so that what is there is whole.
        partial = result.with_suffix(".partial.npz")
        spec = base | {"variant": variant._asdict(), "seed": seed, "result": str(partial)}
        problem = _work(spec, device, at_a_time)
        if not problem:
            partial.rename(result)
        return problem

    with ThreadPoolExecutor(at_a_time) as pool:
        problems = list(pool.map(run, jobs))
    files, failures = {}, []
    for job, problem in zip(jobs, problems, strict=True):
        if problem:
            failures.append(f"seed {job[0]}, {job[1].label}: {problem}")
        else:
            files[job] = _file(work, job)
    return files, failures


def _file(work: Path, job: Job) -> Path:
    seed, variant = job
    return work / f"{seed} {variant.label.replace(',', '')}.npz".replace(" ", "_")


def _work(spec: dict[str, Any], device: str, at_a_time: int) -> str:
    """Runs a worker; returns the last line of what went wrong."""
    environment = dict(os.environ)
    if device == "cuda":
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / at_a_time:.3f}"
    else:
        environment["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "spec.json")
        file.write_text(json.dumps(spec))
        process = subprocess.Popen(
            [sys.executable, "-m", "parity.training.worker", str(file)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines = [*lines[-30:], line.rstrip()]
            if ": step " in line:
                print(line, end="", file=sys.stderr, flush=True)
        if process.wait() == 0:
            return ""
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    return next((line for line in reversed(lines) if line), f"exit status {process.returncode}")
