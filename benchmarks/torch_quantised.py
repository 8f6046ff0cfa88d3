"""Level `quantised --torch`: the step of level `step --torch` over NF4 of bitsandbytes'.

PEFT's LoRA over it is QLoRA, its DoRA QDoRA; torch_dora's has no dense copy of a weight for its
norm.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks import torch_step
from benchmarks.results import Row
from benchmarks.torch_step import TINY as TINY
from benchmarks.torch_step import Side, measure_sides, steps

Settings = functools.partial(torch_step.Settings, shape=(1, 4096))
SIDES = tuple(
    Side(package, method, in_4bit=True)
    for package, method in (("PEFT", "LoRA"), ("PEFT", "DoRA"), ("torch_dora", "DoRA"))
)


def measure(settings: torch_step.Settings, device: str) -> Iterator[Row]:
    """Yields one row a side."""
    return measure_sides(SIDES, steps, settings, device, {"layout": "one device", "devices": 1})
