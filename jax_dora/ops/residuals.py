"""Residuals of custom gradients, as arrays whose structure does not depend on what is wanted.

A jitted function is traced once and may be differentiated at two places with respect to different
arguments. JAX then unpacks the residuals of both by the structure that the second had, so None and
True are kept as empty arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_NONE, _TRUE = jnp.bool_, jnp.int8


def pack(tree: Any) -> Any:
    """Returns `tree`, of arrays that are neither bool nor int8, None and True, as arrays alone."""

    def one(leaf: Any) -> Any:
        if leaf is None or leaf is True:
            return lax.full((0,), 0, _NONE if leaf is None else _TRUE)
        return leaf

    return jax.tree.map(one, tree, is_leaf=lambda leaf: leaf is None)


def unpack(packed: Any) -> Any:
    """Returns what was packed."""
    constants = {jnp.dtype(_NONE): None, jnp.dtype(_TRUE): True}
    return jax.tree.map(lambda leaf: constants.get(leaf.dtype, leaf), packed)


def wanted(primals: Any) -> Any:
    """Returns `primals`, from a custom_vjp with symbolic zeros, with True where one is
    differentiated and None elsewhere."""
    return type(primals)(*(True if p is not None and p.perturbed else None for p in primals))


def values(primals: Any) -> Any:
    """Returns the arrays of `primals`, from a custom_vjp with symbolic zeros."""
    return type(primals)(*(None if p is None else p.value for p in primals))
