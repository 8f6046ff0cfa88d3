"""The two sides of parity, JAX and torch, and the interface that both implement at every level.

A side is a package of modules, one per level. They are imported when needed and define these
functions:

    operators   norm, compose, layer: return a function that runs the computation, any number of
                times. compose and layer return their results by name: "y", "d_x" and so on.
                magnitude_scale returns g. apply: y of a layer alone, without a gradient.
    bank        rows: a mixed batch over a bank of adapters
    decoder     compute: a decoder of Qwen3's design on given weights, forward and backward
    training    train: trains a small decoder, given settings, the base model's folder, the initial
                adapter and the seed of the batch order
    sharded     in_each: runs `layer` or `losses` in several layouts on several devices

On both sides tensors are torch's, in PyTorch's layout. An `implementation` is one of

    "mosaic", "xla"; "triton", "eager"    the packages' implementations; None: the package chooses
    "plain"     the same computation in the framework's own operations
    "base"      the model without adapters
    "peft"      Hugging Face PEFT's layers, on torch's side
"""

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
    """One framework: its name, and the names of its package's implementations without and with
    kernels."""

    name: Backend
    plain: str
    kernels: str

    operators = property(lambda self: self.level("operators"))
    bank = property(lambda self: self.level("bank"))
    decoder = property(lambda self: self.level("decoder"))
    training = property(lambda self: self.level("training"))
    sharded = property(lambda self: self.level("sharded"))

    def level(self, name: str) -> Any:
        return importlib.import_module(f"parity.sides.{self.name}.{name}")


SIDES: dict[Backend, Side] = {
    "jax": Side("jax", "xla", "mosaic"),
    "torch": Side("torch", "eager", "triton"),
}


def choose_operator(
    op: Callable, plain: Callable, implementation: Implementation, **options: Any
) -> Callable:
    """Returns a package's operator with its implementation bound, or the plain operator."""
    if implementation != "plain":
        return functools.partial(op, implementation=implementation, **options)
    return functools.partial(plain, **options)
