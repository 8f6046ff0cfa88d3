"""The two forms of the compose, as either side calls them."""

import functools
from collections.abc import Callable
from typing import Any


def composes(
    ops: Any, plain: Callable[..., Any], scale: float, implementation: str
) -> dict[str, Callable[..., Any]]:
    """Returns the functions of `base`, `lora` and `g` by name: a package's `ops`, or `plain` where
    that is the implementation."""
    return {
        name: functools.partial(plain, scale=scale, delta=name == "compose_delta")
        if implementation == "plain"
        else functools.partial(getattr(ops, name), scale=scale, implementation=implementation)
        for name in ("compose", "compose_delta")
    }
