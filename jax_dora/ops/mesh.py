"""Inside `jax.shard_map`: over which axes of the mesh an array varies.

With check_vma, its default, a custom gradient has to vary over the same axes as its primal, and
what a kernel makes is taken to vary over none.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax


def vary_alike(*operands: jax.Array | None) -> tuple[Any, ...]:
    """The operands, each varying over every axis that one of them varies over; None stays None.

    The gradient of one that varied over fewer is then summed over the others.
    """
    axes = _axes(operands)
    return tuple(None if operand is None else _vary(operand, axes) for operand in operands)


def jit[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`jax.jit`, with these static arguments, of a function around a kernel.

    Its results vary over every axis that one of its operands varies over.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.partial(jax.jit, static_argnames=static)
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            axes = _axes(jax.tree.leaves((args, kwargs)))
            return jax.tree.map(lambda result: _vary(result, axes), function(*args, **kwargs))

        return call

    return decorate


def _axes(values: Iterable[Any]) -> frozenset[Any]:
    arrays = (value for value in values if isinstance(value, jax.Array))
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def _vary(array: jax.Array, axes: frozenset[Any]) -> jax.Array:
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return lax.pcast(array, tuple(missing), to="varying") if missing else array
