"""Level `scale --torch`: the step of level `step --torch` under FSDP2, layer by layer.

One process for each GPU. With fp32 adapters under autocast, which is what torch_dora and PEFT have
by default, and with PEFT's bf16 ones.
"""

from __future__ import annotations

import functools

from benchmarks import torch_step
from benchmarks.torch_step import Side
from benchmarks.torch_step import measure as measure

SIDES = (
    Side("PEFT", "LoRA", wide=True),
    Side("PEFT", "DoRA", wide=True),
    Side("torch_dora", "DoRA", wide=True),
    Side("PEFT", "DoRA"),
)
Settings = functools.partial(torch_step.Settings, sides=SIDES, sharded=True)
TINY = torch_step.TINY._replace(sides=SIDES, sharded=True)
