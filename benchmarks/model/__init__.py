"""Level `model`: a Qwen3-8B-shaped decoder of random weights."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.clock import Effort
from benchmarks.model.protocol import KINDS, QUICK, QWEN3, Kind, Protocol, Task
from benchmarks.work import Work, matches, shape_name

EFFORT: dict[Task, Effort] = {
    "inference": Effort(seconds=1.0, least=3, most=20, blocks=5),
    "gradient": Effort(seconds=1.5, least=2, most=20, blocks=5),
    "step": Effort(seconds=1.5, least=2, most=20, blocks=5),
}


def works(device: str, settings: Any) -> Iterator[Callable[[], Work]]:
    """Yields every kind at each of its tasks that is chosen; nothing else is built."""
    protocol = QUICK if settings.quick else QWEN3
    for kind in KINDS:
        for task in kind.tasks:
            if matches(f"model {task} {shape_name(protocol.shape())} {kind.label}", settings.only):
                yield functools.partial(work, kind, task, protocol, device)


def work(kind: Kind, task: Task, protocol: Protocol, device: str, checked: bool = True) -> Work:
    """Returns one task of a kind as a piece of work with that one variant.

    Without `checked` nothing is held against fp32, and any result passes.
    """
    side = importlib.import_module(f"benchmarks.model.{kind.framework}_model")
    variant = side.variant(kind, task, protocol, device)
    if not checked:
        variant = dataclasses.replace(variant, check=None, results=lambda _: {})
    baselines = {kind.label: kind.baseline} if kind.baseline else {}
    shape, effort = protocol.shape(), EFFORT[task]
    return Work(f"model {task}", shape, 0, 0, {}, [variant], baselines, effort)
