"""Level `quantised --torch`: the step of level `step --torch` over NF4 of bitsandbytes'.

PEFT's LoRA over it is QLoRA, its DoRA QDoRA; torch_dora's has no dense copy of a weight for its
norm.
"""

from __future__ import annotations

import functools

from benchmarks import step_torch
from benchmarks.step_torch import Side
from benchmarks.step_torch import measure as measure

SIDES = tuple(
    Side(package, method, in_4bit=True)
    for package, method in (("PEFT", "LoRA"), ("PEFT", "DoRA"), ("torch_dora", "DoRA"))
)
Settings = functools.partial(step_torch.Settings, shape=(1, 4096), sides=SIDES)
TINY = step_torch.TINY._replace(sides=SIDES)
