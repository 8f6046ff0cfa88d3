"""Custom gradients with residuals whose pytree structure is always the same.

A jitted function is traced once, and may be differentiated in two places with respect to different
arguments. JAX then unpacks the residuals of both with the structure of the second. So that the
structure does not depend on the wanted gradients, None and True are kept as empty arrays.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

_NONE, _TRUE = jnp.bool_, jnp.int8
_EMPTY = (0,)


def with_gradient(
    kind: Any, define: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `define`, `(settings, operands) -> result`, with a custom gradient, in reverse mode.

    `forward` is `(settings, operands, wanted) -> (result, kept)`, and `backward` `(settings, kept,
    cotangent) -> gradients`, by the operands' names, where an absent one has none. Operands are a
    NamedTuple `kind` of arrays and None; `wanted` is one of True and None.
    """
    function = jax.custom_vjp(define, nondiff_argnums=(0,))

    def with_residuals(settings: Any, primals: Any) -> tuple[Any, Any]:
        operands = jax.tree.map(lambda primal: primal.value, primals)
        wanted = kind(
            *(any(leaf.perturbed for leaf in jax.tree.leaves(p)) or None for p in primals)
        )
        result, kept = forward(settings, operands, wanted)
        return result, pack(kept)

    def gradients(settings: Any, packed: Any, cotangent: Any) -> tuple[Any]:
        is_zero = isinstance(cotangent, SymbolicZero)
        by_name = {} if is_zero else backward(settings, unpack(packed), cotangent)
        return (kind(*(by_name.get(name) for name in kind._fields)),)

    function.defvjp(with_residuals, gradients, symbolic_zeros=True)
    return function


def pack(tree: Any) -> Any:
    """Returns a pytree of arrays, None and True as one of arrays only: None and True become empty
    vectors of bool and of int8, which no operand is."""

    none, true = (lax.full(_EMPTY, 0, dtype) for dtype in (_NONE, _TRUE))

    def pack_leaf(leaf: Any) -> Any:
        return none if leaf is None else true if leaf is True else leaf

    return jax.tree.map(pack_leaf, tree, is_leaf=lambda leaf: leaf is None)


def unpack(packed: Any) -> Any:
    """Returns the pytree that `pack` was given."""
    constants = {jnp.dtype(_NONE): None, jnp.dtype(_TRUE): True}

    def unpack_leaf(leaf: Any) -> Any:
        return constants.get(leaf.dtype, leaf) if leaf.shape == _EMPTY else leaf

    return jax.tree.map(unpack_leaf, packed)
