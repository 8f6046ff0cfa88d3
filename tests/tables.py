"""Tables of cases of which `make test` takes a few, and `make test-all` the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*case: Any) -> Any:
    """Returns one case of a table, for `make test-all` alone."""
    return pytest.param(*case, marks=pytest.mark.slow)


def thinned(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Returns pytest's parameters for `cases`, marked slow but for those that `quick` names.

    A case is one value, or a tuple of them. Raises ValueError if `quick` names what is no case.
    """
    cases, quick = list(cases), list(quick)
    for one in quick:
        if one not in cases:
            raise ValueError(f"quick names {one!r}, which is none of the {len(cases)} cases")
    each = [(one if isinstance(one, tuple) else (one,), one in quick) for one in cases]
    return [pytest.param(*case) if is_quick else slow(*case) for case, is_quick in each]
