"""Custom gradients, with residuals whose structure does not depend on what is wanted.

A jitted function is traced once and may be differentiated at two places with respect to different
arguments. JAX then unpacks the residuals of both by the structure that the second had, so None and
True are kept as empty arrays.
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
    """Returns `define` with a gradient of its own, in reverse mode.

    Args:
      kind: the NamedTuple of arrays and None that the operands are.
      define: `(static, operands) -> result`.
      forward: `(static, operands, wanted) -> (result, kept)`; `wanted` has True for each operand
        that is differentiated, and None for the others.
      backward: `(static, kept, cotangent) -> gradients`, by the operands' names; without a name, or
        None, for those that have none.
    """
    function = jax.custom_vjp(define, nondiff_argnums=(0,))

    def with_residuals(static: Any, primals: Any) -> tuple[Any, Any]:
        operands = jax.tree.map(lambda primal: primal.value, primals)
        wanted = kind(*(any(one.perturbed for one in jax.tree.leaves(p)) or None for p in primals))
        result, kept = forward(static, operands, wanted)
        return result, pack(kept)

    def gradients(static: Any, packed: Any, cotangent: Any) -> tuple[Any]:
        zero = isinstance(cotangent, SymbolicZero)
        found = {} if zero else backward(static, unpack(packed), cotangent)
        return (kind(*(found.get(name) for name in kind._fields)),)

    function.defvjp(with_residuals, gradients, symbolic_zeros=True)
    return function


def pack(tree: Any) -> Any:
    """Returns `tree`, of arrays, None and True, as arrays alone. None and True become empty vectors
    of bool and of int8, which no operand is."""

    def one(leaf: Any) -> Any:
        if leaf is None or leaf is True:
            return lax.full(_EMPTY, 0, _NONE if leaf is None else _TRUE)
        return leaf

    return jax.tree.map(one, tree, is_leaf=lambda leaf: leaf is None)


def unpack(packed: Any) -> Any:
    constants = {jnp.dtype(_NONE): None, jnp.dtype(_TRUE): True}

    def one(leaf: Any) -> Any:
        return constants.get(leaf.dtype, leaf) if leaf.shape == _EMPTY else leaf

    return jax.tree.map(one, packed)
