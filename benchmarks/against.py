"""Two checkouts side by side in one run: the same program with the packages of each, in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks import model
from benchmarks.clock import Spread
from benchmarks.report import Measurement, Report
from benchmarks.worker import ROOT, Deadline, Worker, WorkerError

# How often each checkout has its turn.
ROUNDS = 7
CLOCKS = ("device", "wall")


def check(root: Path) -> str:
    """Returns why `root` is no checkout to compare with, or an empty string."""
    if not (root / "jax_dora" / "__init__.py").is_file():
        return f"{root} holds no jax_dora; expected the root of another checkout"
    return "" if root.resolve() != ROOT.resolve() else f"{root} is this very checkout"


def run(report: Report, there: Path, spec: dict[str, Any], tasks: tuple[str, ...], seconds: float):
    """Measures this checkout and the one at `there` into `report`, and shows their ratios.

    The rows' `state` is "here" or "there"; each time is the median of its turns.
    """
    deadline = Deadline(seconds)
    table = Table(box=SIMPLE_HEAD, title="time here over time there, medians of turns")
    for name in ("work", "variant", *CLOCKS, "peak memory"):
        table.add_column(name)
    for one in _specs(spec, tasks):
        try:
            with ExitStack() as stack:
                workers = {
                    state: stack.enter_context(Worker(one, deadline, root))
                    for state, root in (("here", ROOT), ("there", there.resolve()))
                }
                for pair in _pairs(workers):
                    for measurement in pair.values():
                        report.add(measurement)
                    table.add_row(*_ratios(pair))
        except (TimeoutError, WorkerError) as error:
            report.console.print(f"[bold red]{one.get('kind', {}).get('name', '')} {error}")
            table.add_row(one["level"], one.get("kind", {}).get("name", ""), str(error)[:60])
    report.console.print(table)


def _specs(spec: dict[str, Any], tasks: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    if spec["level"] == "layer":
        yield spec
        return
    for kind in model.chosen(spec["only"], tasks, compared=True):
        yield spec | {"kind": dataclasses.asdict(kind)}


def _pairs(workers: dict[str, Worker]) -> Iterator[dict[str, Measurement]]:
    """Yields the two measurements of each piece of work, both checkouts having had their turns."""
    while True:
        # One after the other: while XLA tries kernels, nothing else may run.
        rows = {state: worker.ask("prepare") for state, worker in workers.items()}
        if None in rows.values():
            return
        times: dict[str, dict[str, list[float]]] = {
            state: {clock: [] for clock in CLOCKS} for state in workers
        }
        if not any(row.get("refused") for row in rows.values()):
            for turn in range(ROUNDS):
                for state in list(workers)[:: 1 if turn % 2 else -1]:
                    for clock, spread in workers[state].ask("time").items():
                        if spread:
                            times[state][clock].append(spread["median"])
        yield {
            state: dataclasses.replace(
                Measurement.from_row(rows[state]),
                state=state,
                **{c: Spread.of(found) for c, found in times[state].items() if found},
            )
            for state in workers
        }


def _ratios(pair: dict[str, Measurement]) -> list[str]:
    here, there = pair["here"], pair["there"]
    cells = [here.name, here.label]
    for clock in CLOCKS:
        ours, theirs = here.time(clock), there.time(clock)
        cells.append(f"{ours / theirs:.3f}" if ours and theirs else _why(here, there))
    memory = (here.peak_bytes or here.temp_bytes, there.peak_bytes or there.temp_bytes)
    cells.append(f"{memory[0] / memory[1]:.3f}" if memory[0] and memory[1] else "–")
    return cells


def _why(*measurements: Measurement) -> str:
    for m in measurements:
        if m.refused or (m.check and not m.correct):
            return f"{m.state}: {m.refused[:40] or 'its check is red'}"
    return "–"
