"""The pieces of work that can be measured, and the variants that do each.

Operators, layers and whole models, in JAX, in torch and by PEFT, are all of these two classes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from benchmarks.clock import Effort
    from benchmarks.results import Row

Framework = Literal["jax", "torch"]


@dataclass(frozen=True)
class Expectation:
    """The fp64 value of one result, and what an element of it may be off by.

    Without a bound it serves variants that are not exact.
    """

    want: torch.Tensor
    bound: torch.Tensor | None = None


@dataclass(frozen=True)
class Variant:
    """One way to do a piece of work.

    Attributes:
      framework: whose arrays it takes.
      name: unique within its work and framework.
      step: a function of arrays, which is compiled if it is JAX's.
      inputs: rotating sets of arguments.
      results: from what `step` returns to named tensors, in the layout of what is expected; None
        where they are named already, or in that order.
      exact: held to the tolerances of `parity.tolerances`; a variant of others is only asked to
        compute the same function.
      check: the verdict, where it is not that on `results`.
      flops: where they differ from the work's.
      expected: what fp64 says of this variant's results, where it computes another function.
      compiler_options: for XLA, as in `jax.stages.Lowered.compile`.
      whole: its memory is told as the peak of everything, not as that of temporaries.
    """

    framework: Framework
    name: str
    step: Callable[..., Any]
    inputs: Sequence[tuple]
    results: Callable[[Any], Mapping[str, Any]] | None = None
    exact: bool = True
    check: Callable[[], Row] | None = None
    flops: int | None = None
    expected: Mapping[str, Expectation] | None = None
    compiler_options: Mapping[str, bool | str] = field(default_factory=dict)
    whole: bool = False

    @property
    def label(self) -> str:
        return f"{self.framework} {self.name}"


@dataclass(frozen=True)
class Work:
    """One operation at one shape.

    Attributes:
      group: what is done.
      shape: named sizes.
      bytes: the fewest that must move through device memory.
      flops: of its matrix products.
      expected: from names to what fp64 says.
      variants: those to be compared.
      baselines: from the labels of variants over which speed-ups are stated to the baseline's name;
        where several share one, the fastest counts.
      effort: how long to measure it, where that is not the level's choice.
    """

    group: str
    shape: dict[str, int]
    bytes: int
    flops: int
    expected: Mapping[str, Expectation]
    variants: Sequence[Variant]
    baselines: Mapping[str, str] = field(default_factory=dict)
    effort: Effort | None = None

    @property
    def name(self) -> str:
        return f"{self.group} {shape_name(self.shape)}"


def shape_name(shape: Mapping[str, int]) -> str:
    """Returns `4096×8192 r384` for rows, out and rank; other sizes are written the same way."""
    sizes = "×".join(str(size) for name, size in shape.items() if name != "rank")
    return f"{sizes} r{shape['rank']}" if "rank" in shape else sizes


def matches(name: str, only: Sequence[str]) -> bool:
    """Returns whether `name` begins like one of these `fnmatch` patterns, or there are none."""
    return not only or any(fnmatch.fnmatch(name, f"{pattern}*") for pattern in only)
