"""Level `model`: a Qwen3-8B-shaped decoder of random weights, every variant in a fresh process."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.model.protocol import VARIANTS, Protocol, Variant
from benchmarks.report import Ceilings, Measurement, Report

PACKAGE_ROOT = Path(__file__).parents[2]


def run(
    report: Report,
    device: str,
    quick: bool,
    only: tuple[str, ...],
    seconds: float,
    folder: Path,
    console: Console,
) -> None:
    """Measures every variant into `report`, in order of interest, until `seconds` have passed;
    `only` holds patterns of how
    their labels begin."""
    protocol = Protocol.quick() if quick else Protocol()
    begin = time.monotonic()
    if device == "cuda":
        answer = _worker({"ceilings": True}, seconds, console)
        if isinstance(answer, dict):
            report.ceilings = Ceilings(**answer)
    for variant in VARIANTS:
        if only and not any(fnmatch.fnmatch(variant.label, f"{p}*") for p in only):
            continue
        spec = {
            "variant": dataclasses.asdict(variant),
            "protocol": dataclasses.asdict(protocol),
            "device": device,
        }
        left = seconds - (time.monotonic() - begin)
        found = _worker(spec, left, console) if left > 0 else "no time was left for it"
        if isinstance(found, str):
            found = [dataclasses.asdict(_missing(variant, protocol, found, left > 0))]
        assert isinstance(found, list)
        for measurement in map(Measurement.from_dict, found):
            report.measurements.append(measurement)
            console.print(_line(measurement), highlight=False, soft_wrap=True)
        report.write(folder)
    report.complete = True
    report.write(folder)


def _worker(spec: dict, seconds: float, console: Console) -> list | dict | str:
    """What the worker measured, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder, "spec.json"), Path(folder, "answer.json")
        given.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "benchmarks.model.worker", str(given), str(answer)]
        process = subprocess.Popen(
            command, cwd=PACKAGE_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            output = f"stopped after {seconds:.0f} s"
        # What was measured before a failure counts.
        if answer.exists():
            return json.loads(answer.read_text())
        console.print(output[-2000:], markup=False, highlight=False)
        return (output.strip().splitlines() or ["no output"])[-1][:400]


def _missing(variant: Variant, protocol: Protocol, why: str, failed: bool) -> Measurement:
    return Measurement(
        group=f"model {variant.tasks[0]}",
        shape=protocol.shape(),
        framework=variant.framework,
        variant=variant.name,
        bytes=0,
        flops=0,
        failed=why if failed else "",
        refused="" if failed else why,
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
