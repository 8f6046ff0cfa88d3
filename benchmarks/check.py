"""Is what is being timed correct? Held against fp64 on the very inputs of the timing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.results import Row
from benchmarks.work import Expectation

# A variant of others may round where ours does not, but must compute the same function. A bf16
# result of bf16 products lies within a few roundings, 2⁻⁸ each, of the exact one, in the norm.
SAME_FUNCTION = 2.0**-5


def judge(
    results: Mapping[str, Any],
    expected: Mapping[str, Expectation],
    exact: bool,
    same: float = SAME_FUNCTION,
) -> Row:
    """Returns the verdict on `results`, which must have exactly the expected names.

    Args:
      exact: whether every element is held to its bound, or each result to a relative error.
      same: that relative error, of the norm.

    Returns:
      passed: every result is within its tolerance.
      exact: as given.
      of_bound: if exact, the largest error of an element in units of its bound; None, in a file of
        results, is infinite.
      relative: the largest ‖result - fp64‖ / ‖fp64‖.
      worst: the result that this is about.

    Raises:
      ValueError: a result is missing, unexpected or of another shape.
    """
    if set(results) != set(expected):
        raise ValueError(f"results are {sorted(results)}, expected {sorted(expected)}")
    of_bound, relative, worst = 0.0, 0.0, ""
    for name, expectation in expected.items():
        got, want = results[name], expectation.want
        if tuple(got.shape) != tuple(want.shape):
            raise ValueError(f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        missed = (got.detach().double() - want).abs()
        missed = torch.where(missed.isfinite(), missed, torch.inf)
        length = float(want.norm())
        share = float(missed.norm()) / (length or 1.0)
        if not exact and share >= relative:
            worst = name
        relative = max(relative, share)
        if exact:
            if expectation.bound is None:
                raise ValueError(f"{name} is to be exact, and no bound is given for it")
            share = float((missed / expectation.bound).max())
            worst = name if share >= of_bound else worst
            of_bound = max(of_bound, share)
    passed = of_bound <= 1.0 if exact else relative <= same
    verdict = {"passed": passed, "exact": exact, "of_bound": of_bound}
    return verdict | {"relative": relative, "worst": worst}
