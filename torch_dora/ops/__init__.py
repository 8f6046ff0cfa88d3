"""DoRA as functions of tensors: weight [out, in], lora_a [r, in], lora_b [out, r]."""

from torch_dora.ops.compose import compose, compose_delta
from torch_dora.ops.linear import dora_linear
from torch_dora.ops.norm import factored_norm, magnitude_scale

__all__ = [
    "compose",
    "compose_delta",
    "dora_linear",
    "factored_norm",
    "magnitude_scale",
]
