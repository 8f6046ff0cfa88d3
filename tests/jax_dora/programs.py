"""What a program is made of, before XLA compiles it."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(function: Any, *arguments: Any) -> Iterator[Any]:
    """Yields every equation of the program of `function`, those of loops and calls too."""
    yield from _of(jax.make_jaxpr(function)(*arguments).jaxpr)


def _of(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        parts = jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda part: hasattr(part, "jaxpr") or hasattr(part, "eqns"),
        )
        for part in parts:
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield from _of(part)
