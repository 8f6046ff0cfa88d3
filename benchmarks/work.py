"""Pieces of work, the variants that do each of them, and the check of a variant's results.

The levels ops, layer, triton and tune describe their measurements with these classes, for JAX,
torch and PEFT alike; `benchmarks.measure` checks and times them.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.results import Row

# The name of the baseline that LoRA by XLA is, with Triton's products or without.
BEST_LORA = "the best jax LoRA"

Framework = Literal["jax", "torch"]

# A variant that is not exact may round in other places, but must compute the same function: the
# relative error of a bf16 result, in the norm, is a few roundings of 2⁻⁸ each.
SAME_FUNCTION = 2.0**-5


@dataclass(frozen=True)
class Expectation:
    """The fp64 value of a result, and a bound on the error of each element.

    The bound may be missing if all variants are inexact.
    """

    want: torch.Tensor
    bound: torch.Tensor | None = None


@dataclass(frozen=True)
class Variant:
    """One way to do a piece of work.

    Attributes:
      framework: of the arrays that `step` takes.
      name: unique within the work and the framework.
      step: a function of arrays; a JAX function is compiled before it is timed.
      inputs: sets of arguments, used in rotation.
      results: converts what `step` returns to named tensors in the layout of the expectation; None
        if the results are a mapping already, or in the order of the expectation.
      exact: whether each element must be within the bounds of `parity.tolerances`; otherwise the
        relative error of each result must be below `SAME_FUNCTION`.
      flops: if different from the work's.
      expected: if different from the work's, for a variant that computes another function.
      compiler_options: for XLA, as in `jax.stages.Lowered.compile`.
    """

    framework: Framework
    name: str
    step: Callable[..., Any]
    inputs: Sequence[tuple]
    results: Callable[[Any], Mapping[str, Any]] | None = None
    exact: bool = True
    flops: int | None = None
    expected: Mapping[str, Expectation] | None = None
    compiler_options: Mapping[str, bool | str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.framework} {self.name}"


@dataclass(frozen=True)
class Work:
    """One operation at one shape.

    Attributes:
      group: name of the operation.
      shape: named sizes.
      bytes: the least number of bytes that must move through device memory.
      flops: of the matrix products.
      expected: the expectation of each named result.
      variants: the ways to do it that are compared.
      baselines: labels of variants that serve as baselines, with the baseline's name; the fastest
        of several with one name counts.
    """

    group: str
    shape: dict[str, int]
    bytes: int
    flops: int
    expected: Mapping[str, Expectation]
    variants: Sequence[Variant]
    baselines: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.group} {shape_name(self.shape)}"


def shape_name(shape: Mapping[str, int]) -> str:
    """Returns a shape as text, such as `4096×8192 r384` for rows, out and rank."""
    sizes = "×".join(str(size) for name, size in shape.items() if name != "rank")
    return f"{sizes} r{shape['rank']}" if "rank" in shape else sizes


def matches(name: str, only: Sequence[str]) -> bool:
    """Returns whether `name` begins like one of these `fnmatch` patterns, or there are none."""
    return not only or any(fnmatch.fnmatch(name, f"{pattern}*") for pattern in only)


def judge(results: Mapping[str, Any], expected: Mapping[str, Expectation], exact: bool) -> Row:
    """Returns the verdict on `results`, which must have exactly the expected names.

    Args:
      exact: see `Variant.exact`.

    Returns:
      passed: whether every result is within its tolerance.
      exact: as given.
      of_bound: if exact, the largest error of an element divided by its bound; None in a result
        file means infinity.
      relative: the largest ‖result - fp64‖ / ‖fp64‖.
      worst: the name of the result with the largest error.

    Raises:
      ValueError: a result is missing, unexpected or of another shape.
    """
    if set(results) != set(expected):
        raise ValueError(f"results are {sorted(results)}, expected {sorted(expected)}")
    of_bound, relative = dict.fromkeys(expected, 0.0), {}
    for name, expectation in expected.items():
        got, want, bound = results[name], expectation.want, expectation.bound
        if tuple(got.shape) != tuple(want.shape):
            raise ValueError(f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        error = (got.detach().double() - want).abs()
        error = torch.where(error.isfinite(), error, torch.inf)
        length = float(want.norm())
        # Not divided by 0, nor by the NaN of an expectation with NaN, which must not pass.
        relative[name] = float(error.norm()) / (length if length > 0 else 1.0)
        if exact:
            if bound is None:
                raise ValueError(f"{name} is to be exact, and no bound is given for it")
            # Without an error and with a bound of 0, 0 / 0 would be NaN.
            used = torch.where(error > 0, error / bound, 0)
            of_bound[name] = float(used.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    errors = of_bound if exact else relative
    return {
        "passed": max(errors.values(), default=0.0) <= (1.0 if exact else SAME_FUNCTION),
        "exact": exact,
        "of_bound": max(of_bound.values(), default=0.0),
        "relative": max(relative.values(), default=0.0),
        "worst": max(errors, key=errors.__getitem__, default=""),
    }
