"""Level `scale --torch`: the step of level `step --torch` under FSDP2, layer by layer.

One process for each GPU. With fp32 adapters under autocast, which is what torch_dora and PEFT have
by default, and with PEFT's bf16 ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed

from benchmarks.results import Row
from benchmarks.torch_step import TINY as TINY
from benchmarks.torch_step import Settings, Side, measure_sides, steps
from parity.sides.torch import processes

SIDES = (
    Side("PEFT", "LoRA", wide=True),
    Side("PEFT", "DoRA", wide=True),
    Side("torch_dora", "DoRA", wide=True),
    Side("PEFT", "DoRA"),
)


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields one row a side."""
    count = torch.cuda.device_count() if device == "cuda" else 2

    def taken(side: Side, settings: Settings, device: str) -> Row:
        return processes.run(_steps, count, device, side, settings, device)

    return measure_sides(SIDES, taken, settings, device, {"layout": "fsdp", "devices": count})


def _steps(side: Side, settings: Settings, device: str) -> Row:
    return steps(side, settings, device, torch.distributed.get_world_size())
