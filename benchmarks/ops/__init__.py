"""Level `ops`: the public operators alone, against the rate of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.ops import compose, norm, swiglu
from benchmarks.work import Work


def works(device: str, settings: Any) -> Iterator[Callable[[], Work]]:
    """Yields every piece of work of the level, made when its turn comes."""
    for module in (norm, compose, swiglu):
        yield from module.works(device, settings.quick)
