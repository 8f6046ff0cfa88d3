"""Parameters of tests that are mostly slow: `make test` runs a few, `make test-all` all of them."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*case: Any) -> Any:
    """Returns a case that is marked slow."""
    return pytest.param(*case, marks=pytest.mark.slow)


def thinned(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Returns pytest's parameters for `cases`; all that are not in `quick` are marked slow.

    A case is one value or a tuple of values. Raises ValueError if an element of `quick` is not a
    case.
    """
    cases, quick = list(cases), list(quick)
    for one in quick:
        if one not in cases:
            raise ValueError(f"quick names {one!r}, which is none of the {len(cases)} cases")
    tuples = [(case if isinstance(case, tuple) else (case,), case in quick) for case in cases]
    return [pytest.param(*case) if is_quick else slow(*case) for case, is_quick in tuples]
