"""Parameters of tests that are mostly slow: `make test` runs a few, `make test-all` all of them."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*case: Any) -> Any:
    """Returns a case that is marked slow."""
    return pytest.param(*case, marks=pytest.mark.slow)


def ci(*case: Any) -> Any:
    """Returns a case that is marked ci."""
    return pytest.param(*case, marks=pytest.mark.ci)


def thinned(cases: Iterable[Any], quick: Iterable[Any], in_ci: Iterable[Any] = ()) -> list[Any]:
    """Returns pytest's parameters for `cases`: those in `in_ci` are marked ci, and all others that
    are not in `quick` slow.

    A case is one value or a tuple of values. Raises ValueError if an element of `quick` or `in_ci`
    is not a case.
    """
    cases, quick, in_ci = list(cases), list(quick), list(in_ci)
    for one in quick + in_ci:
        if one not in cases:
            raise ValueError(f"quick or in_ci names {one!r}, none of the {len(cases)} cases")

    def parameters(case: Any) -> Any:
        mark = pytest.param if case in quick else ci if case in in_ci else slow
        return mark(*case) if isinstance(case, tuple) else mark(case)

    return [parameters(case) for case in cases]
