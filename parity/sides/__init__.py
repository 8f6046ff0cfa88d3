"""The two sides of parity, JAX and torch, and the one protocol that both speak at every level.

A side has a module of functions for each level, imported when it is asked for:

    operators   norm, compose and layer: ready to be computed any number of times; of all but the
                norm, the results "y", "d_x" and so on by name. magnitude_scale.
    encoder     adapted, evaluate and train: the pretrained sentence encoder
    decoder     compute: a decoder of Qwen3's design on given weights, forward and backward
    training    train: a run of a small decoder, of settings, the folder of the base model, the
                initial adapter and the seed of the order of the batches
    sharded     in_each of several layouts on several devices: layer, losses

Tensors are torch's, in PyTorch's layout, on either side. Wherever an `implementation` is chosen, it
is one of

    "mosaic", "xla"; "triton", "eager"    the packages' own; None is what a package chooses itself
    "plain"     the same computation in the framework's own operations
    "base"      the model without adapters
    "peft"      Hugging Face PEFT's layers, on torch's side
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Backend = str  # "jax" or "torch"
Implementation = str | None
Computation = Callable[[], Any]


@dataclass(frozen=True)
class Side:
    """One framework: its name, and its package's implementations without and with kernels."""

    name: Backend
    plain: str
    kernels: str

    operators = property(lambda self: self.level("operators"))
    encoder = property(lambda self: self.level("encoder"))
    decoder = property(lambda self: self.level("decoder"))
    training = property(lambda self: self.level("training"))
    sharded = property(lambda self: self.level("sharded"))

    def level(self, name: str) -> Any:
        return importlib.import_module(f"parity.sides.{self.name}.{name}")


SIDES: dict[Backend, Side] = {
    "jax": Side("jax", "xla", "mosaic"),
    "torch": Side("torch", "eager", "triton"),
}


def chosen(
    op: Callable, plain: Callable, implementation: Implementation, **options: Any
) -> Callable:
    """Returns a package's operator with its implementation bound, or the plain operator."""
    if implementation != "plain":
        return functools.partial(op, implementation=implementation, **options)
    return functools.partial(plain, **options)
