"""Tables of cases of which `make test` takes a few, and `make test-all` the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Returns pytest's parameters for `cases`, marked slow but for those that `quick` names.

    A case is one value, or a tuple of them. Raises ValueError if `quick` names what is no case.
    """
    cases, quick = list(cases), list(quick)
    for one in quick:
        if one not in cases:
            raise ValueError(f"quick names {one!r}, which is none of the {len(cases)} cases")
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=[pytest.mark.slow] * (one not in quick),
        )
        for one in cases
    ]
