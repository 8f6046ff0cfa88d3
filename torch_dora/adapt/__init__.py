"""Adds adapters to an existing torch model, removes them, and merges them into the weights."""

from torch_dora.adapt.apply import apply_dora as apply_dora
from torch_dora.adapt.apply import remove_dora as remove_dora
from torch_dora.adapt.coverage import coverage as coverage
from torch_dora.adapt.lora import to_lora as to_lora
from torch_dora.adapt.merge import merge_dora as merge_dora
from torch_dora.adapt.reference import disable_adapters as disable_adapters
from torch_dora.adapt.rule import DoRARule as DoRARule
