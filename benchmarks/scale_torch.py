"""Level `scale --torch`: the step of level `step --torch` under FSDP2, layer by layer.

One process for each GPU. With fp32 adapters under autocast, which is what torch_dora and PEFT have
by default, and with PEFT's bf16 ones.
"""

from __future__ import annotations

import functools

from benchmarks import step_torch
from benchmarks.step_torch import Side
from benchmarks.step_torch import measure as measure

SIDES = (
    Side("PEFT", "LoRA", wide=True),
    Side("PEFT", "DoRA", wide=True),
    Side("torch_dora", "DoRA", wide=True),
    Side("PEFT", "DoRA"),
)
Settings = functools.partial(step_torch.Settings, sides=SIDES, sharded=True)
TINY = step_torch.TINY._replace(sides=SIDES, sharded=True)
