"""Two checkouts side by side in one run: the same program with the packages of each, in turns.

Layers are held against fp64. Of a model, which random numbers fill anew in each checkout, the table
shows a result of both.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.clock import Effort, Spread
from benchmarks.report import Measurement
from benchmarks.work import Variant, Work, matches
from benchmarks.worker import ROOT, Worker, WorkerError

# How often each checkout has its turn, and how long one is.
ROUNDS = 5
EFFORT = Effort(least=3, most=60, blocks=2)
CLOCKS = ("device", "wall")
# rows, in, out, rank
LAYERS = (
    (4096, 4096, 4096, 64),
    (4096, 8192, 8192, 384),
    (4096, 4096, 14336, 64),
    (4096, 14336, 4096, 64),
    (4096, 1024, 3072, 8),
)
QUICK_LAYERS = ((24, 64, 48, 8),)
COMPARED = ("jax DoRA (no Triton)", "jax LoRA (no Triton)")


def check(root: Path) -> str:
    """Returns why `root` is no checkout to compare with, or an empty string."""
    if not (root / "jax_dora" / "__init__.py").is_file():
        return f"{root} holds no jax_dora; expected the root of another checkout"
    return "" if root.resolve() != ROOT.resolve() else f"{root} is this very checkout"


def run(
    there: Path,
    spec: dict[str, Any],
    seconds: float,
    writer: results.Writer | None,
    console: Console,
) -> bool:
    """Measures this checkout and the one at `there`, and prints a table of both.

    Each time is the median of a checkout's turns; the rows' `state` is "here" or "there". Returns
    whether everything was measured and every check passed.
    """
    table = Table(box=SIMPLE_HEAD, title=f"here, and there: {there}; medians of {ROUNDS} turns, µs")
    for name in ("work", "variant", *(f"{c} {s}" for c in CLOCKS for s in ("here", "there", "÷"))):
        table.add_column(name)
    table.add_column("memory ÷")
    table.add_column("a result of both")
    passed, until = True, time.monotonic() + seconds
    spec = spec | {"module": "benchmarks.against"}
    try:
        with ExitStack() as stack:
            workers = {
                state: stack.enter_context(Worker(spec, until, root))
                for state, root in (("here", ROOT), ("there", there.resolve()))
            }
            for pair, values in _pairs(workers):
                cells = [*_cells(pair["here"], pair["there"]), " ".join(values)]
                table.add_row(*cells)
                console.print("  ".join(cells), highlight=False, soft_wrap=True)
                for state, measurement in pair.items():
                    passed &= measurement.correct
                    if writer:
                        writer.add({"state": state} | measurement.row())
    except (TimeoutError, WorkerError) as error:
        console.print(f"[bold red]not all was measured: {error}")
        passed = False
    console.print(table)
    return passed


def _pairs(
    workers: dict[str, Worker],
) -> Iterator[tuple[dict[str, Measurement], list[str]]]:
    """Yields the measurements and a result of each piece of work, after the turns of both."""
    while True:
        # One after the other: while XLA tries kernels, nothing else may run.
        rows = {state: worker.ask() for state, worker in workers.items()}
        if None in rows.values():
            return
        values = [f"{row.pop('value'):.5g}" for row in rows.values()]
        times: dict[str, list[dict[str, Any]]] = {state: [] for state in workers}
        for turn in range(ROUNDS):
            for state in list(workers)[:: 1 if turn % 2 else -1]:
                times[state].append(workers[state].ask("time"))
        found = {}
        for state, turns in times.items():
            spreads = {c: Spread.of([t[c] for t in turns]) for c in CLOCKS if turns[0][c]}
            found[state] = dataclasses.replace(Measurement.from_row(rows[state]), **spreads)
        yield found, values


def _cells(here: Measurement, there: Measurement) -> list[str]:
    cells = [here.name, here.label]
    for clock in CLOCKS:
        ours, theirs = here.time(clock), there.time(clock)
        cells += [f"{time:.1f}" if time else "–" for time in (ours, theirs)]
        cells.append(f"{ours / theirs:.3f}" if ours and theirs else "–")
    memory = (here.peak_bytes or here.temp_bytes, there.peak_bytes or there.temp_bytes)
    return [*cells, f"{memory[0] / memory[1]:.3f}" if memory[0] and memory[1] else "–"]


def serve(spec: dict[str, Any]) -> Generator[dict[str, Any], str, None]:
    """Yields a measurement without times of each piece of work, and its times when asked."""
    from benchmarks.measure import Bench, free, identity, prepare, take_times

    bench = Bench.on(spec["device"], spec["quick"])
    for work, variant in _cases(spec["device"], spec["quick"]):
        if not matches(f"{work.name} {variant.label}", spec["only"]):
            continue
        work = dataclasses.replace(work, effort=EFFORT)
        step, facts = prepare(bench, work, variant)
        leaf = jax.tree.leaves(step(*variant.inputs[0]))[0]
        value = float(jnp.abs(leaf.astype(jnp.float32)).mean())
        row = Measurement(**identity(work, variant), **facts).row()
        request = yield row | {"value": value}
        while request == "time":
            spreads = take_times(bench, work, variant, step)
            request = yield {clock: spread and spread.median for clock, spread in spreads.items()}
        del step, leaf
        free()


def _cases(device: str, quick: bool) -> Iterator[tuple[Work, Variant]]:
    from benchmarks import layer, model
    from benchmarks.model.protocol import Kind, Protocol
    from benchmarks.problem import Problem

    for shape in QUICK_LAYERS if quick else LAYERS:
        problem = functools.cache(functools.partial(Problem.draw, *shape, device))
        for backward in (True,) if quick else (False, True):
            work = layer.work(problem, False, backward, ("jax",))
            yield from ((work, v) for v in work.variants if v.label in COMPARED)
    protocol = Protocol.quick() if quick else Protocol(layers=6, rank=64, alpha=64)
    for method in ("DoRA",) if quick else ("DoRA", "LoRA"):
        kind = Kind("jax", f"{method} (no Triton)", method, (), fused_swiglu=False)
        for task in ("step",) if quick else ("inference", "step"):
            work = model.work(kind, task, protocol, device, checked=False)
            yield work, work.variants[0]
