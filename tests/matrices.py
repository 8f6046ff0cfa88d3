"""Compares a layer that computes a matrix product, such as a convolution, with the oracle."""

from typing import Any, NamedTuple

import numpy as np

from parity import oracle, tolerances


class Problem(NamedTuple):
    """A matrix product in Flax layout, with the results to be checked.

    Attributes:
      x: [rows, in].
      dy: [rows, out].
      kernel, lora_a, lora_b: matrices [in, out], [in, rank] and [rank, out].
      magnitude, bias: [out].
      y, d_lora_a, d_lora_b, d_magnitude: the computed result and gradients.
    """

    x: Any
    dy: Any
    kernel: Any
    lora_a: Any
    lora_b: Any
    magnitude: Any
    y: Any
    d_lora_a: Any
    d_lora_b: Any
    d_magnitude: Any
    bias: Any = None


def judge(
    problem: Problem, scale: float, dtype: Any, *, extra_d_magnitude: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Asserts that the results are within the derived bounds; returns the exact d_x [rows, in] and
    its bound. `extra_d_magnitude` [out] is added to the bound of d_magnitude."""
    weights = oracle.from_flax(problem.kernel, problem.lora_a, problem.lora_b)
    arguments = (np.asarray(problem.x, np.float64), *weights, problem.magnitude, scale)
    exact = oracle.dora_linear(*arguments, bias=problem.bias, dtype=dtype)
    grads = oracle.dora_linear_grads(problem.dy, *arguments, dtype=dtype)
    bounds = tolerances.dora_linear(problem.dy, *arguments, dtype, bias=problem.bias)
    y_bound = bounds.y
    if problem.bias is not None:
        # The bias is added to an already rounded result.
        y_bound = y_bound + tolerances.rounding(exact - oracle.fp64(problem.bias), dtype)
    within(problem.y, exact, y_bound)
    within(problem.d_lora_a, grads.d_lora_a.T, bounds.d_lora_a.T)
    within(problem.d_lora_b, grads.d_lora_b.T, bounds.d_lora_b.T)
    d_magnitude_bound = bounds.d_magnitude
    if extra_d_magnitude is not None:
        d_magnitude_bound = d_magnitude_bound + extra_d_magnitude
    within(problem.d_magnitude, grads.d_magnitude, d_magnitude_bound)
    return grads.d_x, bounds.d_x


def within(found: Any, exact: np.ndarray, bound: Any) -> None:
    excess = np.abs(np.asarray(oracle.fp64(found)) - exact) - bound
    assert excess.max() <= 0, f"exceeds its bound by {excess.max()}"
