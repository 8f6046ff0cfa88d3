"""What all kernels share. Triton's own `cdiv` and `next_power_of_2` also work inside kernels, and
are too slow on the host."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton import knobs

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""``triton.jit``, with a type that allows indexing the result with a grid and calling it."""

# The interpreter cannot multiply bf16: there, operands of a product are widened first.
WIDEN = tl.constexpr(bool(knobs.runtime.interpret))


@jit
def number(value):
    """Returns a number that is passed by value, as a torch launch and the interpreter do, or by its
    address, as XLA does."""
    if not WIDEN:
        if value.dtype.is_ptr():
            value = tl.load(value)
    return value


@jit
def bound(value):
    """Returns the bound of a loop. The interpreter makes it a number of Python's, which Triton 3.6
    cannot do by itself with NumPy 2.5."""
    if WIDEN:
        return value.handle.data.item()
    return value


def cdiv(count: int, size: int) -> int:
    """Returns ``count / size``, rounded up."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Returns the smallest power of two that is at least ``count``, and at least 1."""
    return 1 << max(0, count - 1).bit_length()
