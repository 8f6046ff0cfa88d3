"""The frame around every launch of a Mosaic kernel."""

import functools
from collections.abc import Callable

import jax


def launcher[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for a kernel's launch: `jax.jit`, with these and the knobs static."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        # A program names what is jitted: by the kernel.
        function.__name__ = function.__module__.rpartition(".")[2]
        return functools.wraps(function)(
            jax.jit(function, static_argnames=("config", "sm_count", *static))
        )

    return decorate
