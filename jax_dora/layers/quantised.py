"""Flax layers over quantised kernels: their arithmetic, by the hooks that Flax has for it.

`nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum` and `nnx.Conv` take their promotion of dtypes and
their product as attributes. Those below dequantise the kernel for the product, and again for the
product's gradient, and do with plain arrays what Flax's do.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from jax_dora.ops import quantised

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv)


def promoting(array: Any) -> Any:
    """Returns the array whose dtype counts where a layer promotes: a quantised one's scales."""
    return array.scale if quantised.is_quantised(array) else array


def promote_dtype(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Returns arrays cast to one dtype, as Flax's does, and quantised ones as they are."""
    promoted = dtypes.promote_dtype(tuple(map(promoting, args)), dtype=dtype, inexact=inexact)
    pairs = zip(args, promoted, strict=True)
    return tuple(one if quantised.is_quantised(one) else cast for one, cast in pairs)


def dot_general(lhs: jax.Array, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """Returns `lax.dot_general` of arrays of which the second may be quantised."""
    return quantised.multiplied(lambda x, w: lax.dot_general(x, w, *args, **kwargs), lhs, rhs)


def einsum(equation: str, lhs: jax.Array, rhs: Any, **kwargs: Any) -> jax.Array:
    """Returns `jnp.einsum` of arrays of which the second may be quantised."""
    return quantised.multiplied(lambda x, w: jnp.einsum(equation, x, w, **kwargs), lhs, rhs)


def convolve(lhs: jax.Array, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """Returns `lax.conv_general_dilated` of arrays of which the second may be quantised."""
    function = functools.partial(_convolve, args, kwargs)
    return quantised.multiplied(function, lhs, rhs)


def _convolve(args: Any, kwargs: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(lhs, rhs, *args, **kwargs)


ARITHMETIC = {
    "promote_dtype": promote_dtype,
    "dot_general": dot_general,
    "einsum_op": einsum,
    "conv_general_dilated": convolve,
}


def compute_quantised(layer: Any) -> None:
    """Makes a layer of one of `LAYERS`, in place, one that computes with a quantised kernel."""
    for name, function in ARITHMETIC.items():
        if hasattr(layer, name):
            setattr(layer, name, function)


def compute_plain(layer: Any) -> None:
    """Reverses `compute_quantised`."""
    base = next(one for one in LAYERS if isinstance(layer, one))
    parameters = inspect.signature(base.__init__).parameters
    for name in ARITHMETIC:
        if hasattr(layer, name):
            setattr(layer, name, parameters[name].default)
