"""The decorator of the host functions that launch Mosaic kernels."""

import functools
from collections.abc import Callable

import jax


def launcher[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that jits a kernel's `launch`; `config`, `sm_count` and `static` are
    static arguments."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        # Programs show the name of a jitted function; "launch" would not tell which kernel it is.
        function.__name__ = function.__module__.rpartition(".")[2]
        return functools.wraps(function)(
            jax.jit(function, static_argnames=("config", "sm_count", *static))
        )

    return decorate
