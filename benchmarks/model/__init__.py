"""Level `model`: a Qwen3-8B-shaped decoder of random weights, every kind in a fresh process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from benchmarks.clock import Effort
from benchmarks.model.protocol import KINDS, Kind, Protocol, Task, group
from benchmarks.report import Measurement, Report
from benchmarks.work import Work, matches, shape_name
from benchmarks.worker import Worker, WorkerError

EFFORT: dict[Task, Effort] = {
    "inference": Effort(seconds=1.0, least=3, most=20, blocks=5),
    "gradient": Effort(seconds=1.5, least=2, most=20, blocks=5),
    "step": Effort(seconds=1.5, least=2, most=20, blocks=5),
    "accumulation": Effort(seconds=0.0, least=1, most=1, blocks=3),
}


def works(kind: Kind, protocol: Protocol, device: str, checked: bool = True) -> Iterator[Work]:
    """Yields each task of a kind as a piece of work with that one variant.

    Without `checked` nothing is held against fp32, and any result passes.
    """
    if kind.framework == "jax":
        from benchmarks.model.jax_model import variants
    else:
        from benchmarks.model.torch_model import variants
    baselines = {kind.label: kind.baseline} if kind.baseline else {}
    for task, variant in variants(kind, protocol, device):
        if not checked:
            variant = dataclasses.replace(variant, check=None, results=lambda _: {})
        options = {"baselines": baselines, "effort": EFFORT[task]}
        yield Work(group(task), protocol.shape(), 0, 0, {}, [variant], **options)


def chosen(only: Sequence[str], protocol: Protocol) -> Iterator[Kind]:
    """Yields the kinds to measure, each with its tasks that `only` chooses."""
    for kind in KINDS:
        names = {t: f"{group(t)} {shape_name(protocol.shape())} {kind.label}" for t in kind.tasks}
        if tasks := tuple(task for task, name in names.items() if matches(name, only)):
            yield dataclasses.replace(kind, tasks=tasks)


def run(report: Report, device: str, quick: bool, only: Sequence[str], seconds: float) -> None:
    """Measures kinds into `report`, in order of interest, until `seconds` have passed."""
    until, protocol = time.monotonic() + seconds, Protocol.of(quick)
    for kind in chosen(only, protocol):
        measured: set[str] = set()
        failed = refused = ""
        spec = {"module": __name__, "kind": dataclasses.asdict(kind), "quick": quick}
        try:
            with Worker(spec | {"device": device}, until) as worker:
                while (found := worker.ask()) is not None:
                    m = Measurement.from_row(found)
                    measured.add(m.group)
                    report.add(m)
        except TimeoutError as error:
            refused = str(error)
        except WorkerError as error:
            failed = str(error)
        for task in kind.tasks:
            if group(task) not in measured:
                # What a stopped process has measured before counts; the rest is named.
                failed = failed or ("" if refused else "its process ended without it")
                named = (group(task), protocol.shape(), kind.framework, kind.name, 0, 0)
                report.add(Measurement(*named, refused=refused, failed=failed))


def serve(spec: dict[str, Any]) -> Generator[dict[str, Any], str, None]:
    """Yields the measurement of each task of a kind."""
    from benchmarks.measure import Bench, measure

    bench = Bench.on(spec["device"], spec["quick"])
    kind = Kind(**(spec["kind"] | {"tasks": tuple(spec["kind"]["tasks"])}))
    for work in works(kind, Protocol.of(bench.quick), bench.device):
        yield measure(bench, work, work.variants[0]).row()
