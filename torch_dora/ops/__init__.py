"""DoRA as functions of tensors: weight [out, in], lora_a [r, in], lora_b [out, r]."""

from typing import TYPE_CHECKING

from dora_common.renamed import no_attribute as _no_attribute
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

if not TYPE_CHECKING:  # a type checker would accept any attribute of the package

    def __getattr__(name: str) -> None:
        raise _no_attribute(__name__, name)
