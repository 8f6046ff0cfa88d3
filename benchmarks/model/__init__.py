"""Level `model`: a Qwen3-8B-shaped decoder of random weights, every variant in a fresh process."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.model.protocol import VARIANTS, Protocol, Task, Variant, group
from benchmarks.report import Ceilings, Measurement, Report

PACKAGE_ROOT = Path(__file__).parents[2]


def run(
    report: Report,
    device: str,
    quick: bool,
    only: tuple[str, ...],
    tasks: tuple[str, ...],
    seconds: float,
    folder: Path,
    console: Console,
) -> None:
    """Measures every variant into `report`, in order of interest, until `seconds` have passed.

    `only` holds patterns of how their labels begin, `tasks` those to measure; none is all.
    """
    protocol = Protocol.quick() if quick else Protocol()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        # What one process has compiled, and which of cuBLAS's kernels it found to be the fastest,
        # the next need not find out again.
        environment = {"JAX_COMPILATION_CACHE_DIR": cache} if device == "cuda" else {}
        if device == "cuda":
            outcome = _worker({"ceilings": True}, seconds, environment, console)
            if outcome.answer is not None:
                report.ceilings = Ceilings(**outcome.answer)
        for variant in _chosen(only, tasks):
            spec = {
                "variant": dataclasses.asdict(variant),
                "protocol": dataclasses.asdict(protocol),
                "device": device,
            }
            left = seconds - (time.monotonic() - begin)
            outcome = _worker(spec, left, environment, console)
            found = [Measurement.from_dict(one) for one in outcome.answer or ()]
            measured = {one.group for one in found}
            found += [
                _missing(variant, task, protocol, outcome)
                for task in variant.tasks
                if group(task) not in measured
            ]
            for measurement in found:
                report.measurements.append(measurement)
                console.print(_line(measurement), highlight=False, soft_wrap=True)
            report.write(folder)
    report.complete = True
    report.write(folder)


def _chosen(only: tuple[str, ...], tasks: tuple[str, ...]) -> Iterator[Variant]:
    """The variants to measure, each with its tasks that were asked for."""
    for variant in VARIANTS:
        if only and not any(fnmatch.fnmatch(variant.label, f"{p}*") for p in only):
            continue
        wanted = tuple(task for task in variant.tasks if not tasks or task in tasks)
        if wanted:
            yield dataclasses.replace(variant, tasks=wanted)


class Outcome(NamedTuple):
    """What a worker measured, None if nothing; why it failed, or was not let finish, if so."""

    answer: Any = None
    failed: str = ""
    refused: str = ""


def _worker(spec: dict, seconds: float, environment: dict[str, str], console: Console) -> Outcome:
    if seconds <= 0:
        return Outcome(refused="no time was left for it")
    failed = refused = ""
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder, "spec.json"), Path(folder, "answer.json")
        given.write_text(json.dumps(spec))
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.model.worker", str(given), str(answer)],
            cwd=PACKAGE_ROOT,
            env=environment | os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            said = _last_line(_kill(process)) or "it had not begun"
            refused = f"no time was left for it: stopped after {seconds:.0f} s ({said})"
        else:
            if process.returncode:
                console.print(output[-2000:], markup=False, highlight=False)
                failed = _last_line(output) or "no output"
        finally:
            # Whatever stopped it, Ctrl-C too.
            if process.poll() is None:
                _kill(process)
        # What was measured before that counts.
        return Outcome(json.loads(answer.read_text()) if answer.exists() else None, failed, refused)


def _kill(process: subprocess.Popen[str]) -> str:
    """What it had said; with its children, which would keep the pipe open."""
    os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]


def _last_line(output: str) -> str:
    return output.strip().split("\n")[-1][:400]


def _missing(variant: Variant, task: Task, protocol: Protocol, outcome: Outcome) -> Measurement:
    return Measurement(
        group=group(task),
        shape=protocol.shape(),
        framework=variant.framework,
        variant=variant.name,
        bytes=0,
        flops=0,
        failed=outcome.failed or ("" if outcome.refused else "its worker ended without it"),
        refused=outcome.refused,
    )


def _line(m: Measurement) -> str:
    words = [f"{m.group:<20} {m.label:<34}"]
    if m.refused or m.failed:
        return f"{words[0]} {m.refused or m.failed}"
    for clock in ("device", "wall"):
        if spread := getattr(m, clock):
            words.append(f"{clock} {spread.median * 1e-3:8.1f} ms")
    if m.peak_bytes:
        words.append(f"{m.peak_bytes / 2**30:6.2f} GiB")
    if m.check:
        words.append(f"off by {m.check.relative:.1e}" + ("" if m.correct else " WRONG"))
    return " ".join(words)
