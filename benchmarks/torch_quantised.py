"""Level `quantised --torch`: the step of level `step --torch` over NF4 of bitsandbytes'.

PEFT's LoRA over it is QLoRA, its DoRA QDoRA; torch_dora's has no dense copy of a weight for its
norm.
"""

from __future__ import annotations

import functools

from benchmarks import torch_step
from benchmarks.torch_step import Side
from benchmarks.torch_step import measure as measure

SIDES = tuple(
    Side(package, method, in_4bit=True)
    for package, method in (("PEFT", "LoRA"), ("PEFT", "DoRA"), ("torch_dora", "DoRA"))
)
Settings = functools.partial(torch_step.Settings, shape=(1, 4096), sides=SIDES)
TINY = torch_step.TINY._replace(sides=SIDES)
