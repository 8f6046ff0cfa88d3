"""The two sides of parity, JAX and torch, and the one protocol that both speak at every level.

A side has a module for each level, which is imported when it is asked for, with these functions.
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
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from parity.cases import ComposeInputs, LayerInputs
    from parity.minilm import Adapter, Batch, Evaluation
    from parity.model.sizes import Run as ModelRun
    from parity.model.weights import Result, Weights
    from parity.training.compare import Run

Backend = str  # "jax" or "torch"
Implementation = str | None
Progress = Callable[[int, float], None]
Computation = Callable[[], Any]


class Operators(Protocol):
    """Operators and one layer, ready to be computed any number of times; of all but the norm, the
    results "y" and "d_x" and so on by name."""

    def norm(
        self, inputs: LayerInputs, scale: float, implementation: Implementation
    ) -> Computation: ...
    def magnitude_scale(
        self, magnitude: Tensor, row_norm: Tensor, dtype: str, implementation: Implementation
    ) -> Tensor: ...
    def compose(
        self, inputs: ComposeInputs, scale: float, implementation: Implementation, *, frozen: bool
    ) -> Computation: ...
    def layer(
        self, inputs: LayerInputs, scale: float, implementation: Implementation, *, frozen: bool
    ) -> Computation: ...


class Encoder(Protocol):
    """The pretrained sentence encoder; `adapted` makes it, with an implementation for all
    projections or one by projection."""

    def adapted(
        self, adapter: Adapter, dtype: str, implementation: Any, device: str = ...
    ) -> Any: ...
    def evaluate(self, encoder: Any, batch: Batch, gradients: bool) -> Evaluation: ...
    def train(self, encoder: Any, batch: Batch, steps: int) -> tuple[list[float], Adapter]: ...


class Decoder(Protocol):
    """A decoder of Qwen3's design on given weights: one forward and one backward pass."""

    def compute(
        self, run: ModelRun, weights: Weights, implementation: Implementation
    ) -> Result: ...


class Training(Protocol):
    """A training run of a small decoder, of `parity.training.settings.Settings`, the folder of the
    base model, the initial adapter, the seed of the batches' order, the implementation, and, as
    options, what is told of the progress and the device."""

    def train(self, *arguments: Any, **options: Any) -> Run: ...


@dataclass(frozen=True)
class Side:
    """One framework: its name, and its package's implementations without and with kernels."""

    name: Backend
    plain: str
    kernels: str

    @property
    def operators(self) -> Operators:
        return self._module("operators")

    @property
    def encoder(self) -> Encoder:
        return self._module("encoder")

    @property
    def decoder(self) -> Decoder:
        return self._module("decoder")

    @property
    def training(self) -> Training:
        return self._module("training")

    def _module(self, level: str) -> Any:
        return importlib.import_module(f"parity.sides.{self.name}.{level}")


SIDES: dict[Backend, Side] = {
    "jax": Side("jax", "xla", "mosaic"),
    "torch": Side("torch", "eager", "triton"),
}


def chosen(
    op: Callable[..., Any],
    plain: Callable[..., Any],
    implementation: Implementation,
    **options: Any,
) -> Callable[..., Any]:
    """Returns a package's operator, by an implementation that it is told, or the plain one."""
    if implementation != "plain":
        return functools.partial(op, implementation=implementation, **options)
    return functools.partial(plain, **options)
