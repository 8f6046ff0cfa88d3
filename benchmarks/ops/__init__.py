"""Level `ops`: the operators alone, against the rate of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.ops import compose, dropout, expand, norm, projection, swiglu
from benchmarks.work import Work


def works(device: str, quick: bool) -> Iterator[Callable[[], Work]]:
    """Every piece of work of the level, made when its turn comes."""
    for module in (norm, expand, projection, dropout, compose, swiglu):
        yield from module.works(device, quick)
