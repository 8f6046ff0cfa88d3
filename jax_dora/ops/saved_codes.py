"""Transposed codes that rematerialisation makes again from the stored ones, by a transpose alone.

The kernel that computes a norm can write the codes of a frozen kernel transposed as well
(`mosaic.norm.transposing_norm`). `jax.checkpoint` keeps the norm (`saved_norm`), but the transposed
codes are as large as the kernel. If the backward pass computes the projection again, it would
compute the norm again for them. `save_codes` marks them by a primitive whose rule for
`jax.checkpoint` transposes the stored codes instead. Everywhere else it is the identity.

With JAX's option `jax_remat3` the norm is computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

from jax_dora.ops.row_scaled import transposed


def save_codes(codes: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns `codes` [out, in], which are `stored` [in, out] transposed. Both are constants."""
    return _save_p.bind(codes, stored)


# (codes, stored) to codes; in the backward pass (stored,) to its transpose.
_save_p = Primitive("save_dora_codes")


def _codes(*arrays: jax.Array) -> jax.Array:
    return arrays[0] if len(arrays) == 2 else transposed(arrays[0])


def _type(*avals: Any) -> Any:
    if len(avals) == 2:
        return avals[0]
    (stored,) = avals
    return stored.update(shape=(*stored.shape[:-2], *stored.shape[:-3:-1]))


_save_p.def_impl(_codes)
_save_p.def_abstract_eval(_type)
mlir.register_lowering(_save_p, mlir.lower_fun(_codes, multiple_results=False))


def _batch(arrays: Sequence[jax.Array], axes: Sequence[int | None]) -> tuple[jax.Array, int]:
    if len(arrays) == 2 and axes[0] is not None:
        return arrays[0], axes[0]
    return jax.vmap(_codes, axes)(*arrays), 0


def _partial_eval(
    policy: Callable[..., Any], unknown: Sequence[bool], computed: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Splits the equation between the forward and the backward pass of `jax.checkpoint`; see
    `saved_norm`."""
    del policy
    if unknown[0]:  # an outer differentiation has not computed the codes yet
        kept = [one for one, again in zip(equation.invars, computed, strict=True) if not again]
        return None, equation, [True], [True], kept
    stored = equation.invars[-1]
    backward = equation.replace(invars=[stored])
    return equation, backward, [False], [True], [] if computed[-1] else [stored]


batching.primitive_batchers[_save_p] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[_save_p] = _partial_eval
