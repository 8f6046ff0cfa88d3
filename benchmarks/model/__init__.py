"""Level `model`: a Qwen3-8B-shaped decoder of random weights, every kind in a fresh process."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence

from benchmarks.clock import Effort
from benchmarks.model.protocol import COMPARED, KINDS, Kind, Protocol, Task, group
from benchmarks.report import Measurement, Report
from benchmarks.work import Work
from benchmarks.worker import Deadline, Worker, WorkerError

EFFORT: dict[Task, Effort] = {
    "inference": Effort(seconds=1.0, least=3, most=20, blocks=5),
    "gradient": Effort(seconds=1.5, least=2, most=20, blocks=5),
    "step": Effort(seconds=1.5, least=2, most=20, blocks=5),
    "accumulation": Effort(seconds=0.0, least=1, most=1, blocks=3),
}


def chosen(only: Sequence[str], tasks: Sequence[str], compared: bool = False) -> Iterator[Kind]:
    """Yields the kinds to measure, each with its tasks that were asked for.

    `compared` yields what two checkouts are compared by, unless `only` or `tasks` ask for others.
    """
    standard = dict(COMPARED) if compared and not (only or tasks) else None
    for kind in KINDS:
        if only and not any(fnmatch.fnmatch(kind.label, f"{p}*") for p in only):
            continue
        if compared and kind.framework != "jax":
            continue
        asked = tasks if standard is None else standard.get(kind.label, ())
        wanted = tuple(t for t in kind.tasks if t in asked or (standard is None and not tasks))
        if wanted:
            yield dataclasses.replace(kind, tasks=wanted)


def protocol_of(quick: bool) -> Protocol:
    return Protocol.quick() if quick else Protocol()


def works(kind: Kind, device: str, quick: bool) -> Iterator[Work]:
    """Yields each task of a kind as a piece of work with that one variant."""
    protocol = protocol_of(quick)
    if kind.framework == "jax":
        from benchmarks.model.jax_model import variants
    else:
        from benchmarks.model.torch_model import variants
    baselines = {kind.label: kind.baseline} if kind.baseline else {}
    for task, variant in variants(kind, protocol, device):
        options = {"baselines": baselines, "effort": EFFORT[task]}
        yield Work(group(task), protocol.shape(), 0, 0, {}, [variant], **options)


def run(report: Report, device: str, quick: bool, kinds: Sequence[Kind], seconds: float) -> None:
    """Measures kinds into `report`, in order of interest, until `seconds` have passed."""
    deadline = Deadline(seconds)
    for kind in kinds:
        measured: set[str] = set()
        failed = refused = ""
        spec = {"level": "model", "kind": dataclasses.asdict(kind), "device": device}
        try:
            with Worker(spec | {"quick": quick}, deadline) as worker:
                while (found := worker.ask("measure")) is not None:
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
                named = (group(task), protocol_of(quick).shape(), kind.framework, kind.name, 0, 0)
                report.add(Measurement(*named, refused=refused, failed=failed))
