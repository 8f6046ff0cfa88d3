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
_EMPTY = (0,)


def pack(tree: Any) -> Any:
    """Returns `tree`, of arrays, None and True, as arrays alone; none of its own is an empty vector
    of bool or int8."""

    def one(leaf: Any) -> Any:
        if leaf is None or leaf is True:
            return lax.full(_EMPTY, 0, _NONE if leaf is None else _TRUE)
        return leaf

    return jax.tree.map(one, tree, is_leaf=lambda leaf: leaf is None)


def unpack(packed: Any) -> Any:
    """Returns what was packed."""
    constants = {jnp.dtype(_NONE): None, jnp.dtype(_TRUE): True}

    def one(leaf: Any) -> Any:
        return constants.get(leaf.dtype, leaf) if leaf.shape == _EMPTY else leaf

    return jax.tree.map(one, packed)


def wanted(primals: Any) -> Any:
    """Returns `primals`, from a custom_vjp with symbolic zeros, with True where one is
    differentiated and None elsewhere; one True for an operand of several arrays."""
    return type(primals)(
        *(any(one.perturbed for one in jax.tree.leaves(p)) or None for p in primals)
    )


def values(primals: Any) -> Any:
    """Returns the arrays of `primals`, from a custom_vjp with symbolic zeros."""
    return jax.tree.map(lambda primal: primal.value, primals)
