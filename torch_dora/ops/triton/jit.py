"""Helpers that launches share. Triton's own `cdiv` and `next_power_of_2` are made for its kernels
too, and take longer on the host than a launch has time for."""

from collections.abc import Callable
from typing import Any

import triton

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""``triton.jit``, typed as what it makes: something to index with a grid, then call."""


def cdiv(count: int, size: int) -> int:
    """Returns how many parts of ``size`` hold ``count``."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Returns the least power of two that is no less than ``count``, at least 1."""
    return 1 << max(0, count - 1).bit_length()
