"""One variant of the model, in a process of its own.

`python -m benchmarks.model.worker SPEC ANSWER` reads what to do from one JSON file and writes what
it measured to another, again after each task.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.check import Check
from benchmarks.clock import QUICK, DeviceClock, Effort, check_clocks, synchronise, wall_time
from benchmarks.model.protocol import Protocol, Task, Variant, group
from benchmarks.report import Measurement

START = time.monotonic()
EFFORT = {
    "inference": Effort(seconds=1.0, least=3, most=20, blocks=5),
    "gradient": Effort(seconds=1.5, least=2, most=20, blocks=5),
    "accumulation": Effort(seconds=0.0, least=1, most=1, blocks=3),
}


class Built(NamedTuple):
    """A task, ready to run: `step` has its arguments; `peak` gives the bytes held at most."""

    task: Task
    step: Callable[[], Any]
    peak: Callable[[], int | None]


class Side(NamedTuple):
    """A framework's half of the work: the check on a few layers, and the tasks in turn."""

    check: Callable[[], Check]
    tasks: Iterable[Built]


def main(given: Path, answer: Path) -> None:
    spec = json.loads(given.read_text())
    if spec.get("ceilings"):
        _write(answer, _ceilings())
        return
    variant = Variant(**(spec["variant"] | {"tasks": tuple(spec["variant"]["tasks"])}))
    protocol = Protocol(**spec["protocol"])
    device = spec["device"]
    side = _side(variant, protocol, device)
    _say("checks a few layers")
    check = side.check()
    # What the check made must not count as the tasks' memory.
    gc.collect()
    clock = DeviceClock() if device == "cuda" else None
    found = []
    _say("builds the model")
    for task, step, peak in side.tasks:
        _say(f"measures {task}")
        measurement = _measure(variant, protocol, task, step, peak, check, clock)
        found.append(dataclasses.asdict(measurement))
        _write(answer, found)
        _say("builds the next task")


def _say(what: str) -> None:
    """What it does now, for a runner that stops it to tell."""
    print(f"{what} since {time.monotonic() - START:.0f} s", flush=True)


def _write(answer: Path, value: Any) -> None:
    """Whole at any time, whenever this process may be stopped."""
    beside = answer.with_suffix(".new")
    beside.write_text(json.dumps(value))
    beside.replace(answer)


def _side(variant: Variant, protocol: Protocol, device: str) -> Side:
    if variant.framework == "jax":
        from benchmarks.model import jax_model

        return jax_model.side(variant, protocol, device)
    from benchmarks.model import torch_model

    return torch_model.side(variant, protocol, device)


def _measure(
    variant: Variant,
    protocol: Protocol,
    task: Task,
    step: Callable[[], Any],
    peak: Callable[[], int | None],
    check: Check,
    clock: DeviceClock | None,
) -> Measurement:
    effort = QUICK if clock is None else EFFORT[task]
    synchronise(step())
    held = peak()
    device = None if clock is None else clock.time(variant.framework, step, [()], effort).total
    wall = wall_time(step, [()], effort)
    if device is not None:
        check_clocks(variant.framework, device, wall)
    return Measurement(
        group=group(task),
        shape=protocol.shape(),
        framework=variant.framework,
        variant=variant.name,
        bytes=protocol.bytes(variant.method),
        flops=protocol.flops(task, variant.method),
        cached=variant.cached,
        baseline=variant.baseline,
        device=device,
        wall=wall,
        peak_bytes=held,
        check=check,
    )


def _ceilings() -> dict[str, float]:
    from benchmarks.measure import Bench, ceilings

    bench = Bench("cuda", DeviceClock(), Effort())
    return dataclasses.asdict(ceilings(bench))


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
