"""Helpers for kernel launches. Triton's own `cdiv` and `next_power_of_2` also work inside kernels,
and are too slow on the host."""

from collections.abc import Callable
from typing import Any

import triton

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""``triton.jit``, with a type that allows indexing the result with a grid and calling it."""


def cdiv(count: int, size: int) -> int:
    """Returns ``count / size``, rounded up."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Returns the smallest power of two that is at least ``count``, and at least 1."""
    return 1 << max(0, count - 1).bit_length()
