"""The two sides of parity, JAX and torch, and the one protocol that both speak at every level.

A side has four modules, which are imported when they are asked for. Wherever an `implementation` is
chosen, it is one of

    "mosaic", "xla"; "triton", "eager"    the packages' own; None is what a package chooses itself
    "plain"     the same computation in the framework's own operations
    "base"      the model without adapters
    "peft"      Hugging Face PEFT's layers, on torch's side

Tensors are torch's, in PyTorch's layout, on either side.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor

    from parity.cases import ComposeInputs, LayerInputs
    from parity.minilm import Adapter, Batch, Evaluation
    from parity.model.sizes import Run as ModelRun
    from parity.model.weights import Result, Weights
    from parity.training.adapter import Adapter as StackedAdapter
    from parity.training.compare import Run
    from parity.training.settings import Settings

Backend = Literal["jax", "torch"]
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
    """The pretrained sentence encoder."""

    def adapted(
        self,
        adapter: Adapter,
        dtype: str,
        implementation: Implementation | Mapping[str, str],
        device: str = "cpu",
    ) -> Any:
        """Returns an encoder with the adapter in it; `implementation` may be by projection."""
        ...

    def evaluate(self, encoder: Any, batch: Batch, gradients: bool) -> Evaluation: ...

    def train(self, encoder: Any, batch: Batch, steps: int) -> tuple[list[float], Adapter]: ...


class Decoder(Protocol):
    """A decoder of Qwen3's design on given weights: one forward and one backward pass."""

    def compute(
        self, run: ModelRun, weights: Weights, implementation: Implementation
    ) -> Result: ...


class Training(Protocol):
    """A training run of a small decoder.

    `base` is the folder of the base model, `adapter` the initial adapter, and `seed` that of the
    order of the batches.
    """

    def train(
        self,
        settings: Settings,
        base: Path,
        adapter: StackedAdapter,
        seed: int,
        implementation: Implementation,
        progress: Progress | None = None,
        device: str = "cpu",
    ) -> Run: ...


@dataclass(frozen=True)
class Side:
    """One framework: its name, and its package's implementations without and with kernels."""

    name: Backend
    plain: str
    kernels: str

    operators = property(lambda self: cast(Operators, self._module("operators")))
    encoder = property(lambda self: cast(Encoder, self._module("encoder")))
    decoder = property(lambda self: cast(Decoder, self._module("decoder")))
    training = property(lambda self: cast(Training, self._module("training")))

    def _module(self, level: str) -> Any:
        return importlib.import_module(f"parity.sides.{self.name}.{level}")


SIDES: dict[Backend, Side] = {
    "jax": Side("jax", "xla", "mosaic"),
    "torch": Side("torch", "eager", "triton"),
}


def composes(
    ops: Any, plain: Callable[..., Any], scale: float, implementation: Implementation
) -> dict[str, Callable[..., Any]]:
    """Returns both forms of the compose by name and a space, functions of `base`, `lora` and `g`:
    those of a package's `ops`, or `plain` where that is the implementation."""
    return {
        f"{name} ": functools.partial(plain, scale=scale, delta=name == "compose_delta")
        if implementation == "plain"
        else functools.partial(getattr(ops, name), scale=scale, implementation=implementation)
        for name in ("compose", "compose_delta")
    }
