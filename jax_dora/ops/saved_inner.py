"""Results that rematerialisation keeps if only the magnitude's gradient reads them.

The last projection of a rematerialised block is not computed again for a plain or a LoRA layer:
nothing in the block reads its result. The gradient of a DoRA layer's magnitude reads inner = x (W +
s·A B), and `jax.checkpoint` would compute the projection again for it alone. `save_inner` marks
inner by a primitive whose rules for `jax.checkpoint` decide: if the backward pass computes the
result again anyway, the gradient reads inner of that, and nothing is kept. If not, inner is kept.
This needs nothing from the user's code, and also holds in `nnx.remat`, `nn.remat` and scans.

A policy of the user's own decides by itself; see `AUTOMATIC_POLICIES`. So does JAX's option
`jax_remat3`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval

# They are not held weakly: in JAX 0.11 two policies may be equal, and the one in the set the first
# to go.
AUTOMATIC_POLICIES: set[Callable[..., Any]] = {jax.checkpoint_policies.nothing_saveable}
"""The policies of `jax.checkpoint` with which inner is kept: none, those of
`jax_dora.remat_policy`, and what is added."""


def save_inner(result: jax.Array, inner: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `result`, for all readers but the magnitude's gradient, and `inner`, for the gradient
    alone. Both have the same shape and dtype, and may be the same array."""
    result, inner, _ = _save_p.bind(result, inner, inner)
    return result, inner


# (result, inner, saved) to themselves. In the backward pass `saved` is inner of the forward pass,
# and the others are computed again.
_save_p = Primitive("save_dora_inner")
_save_p.multiple_results = True
_save_p.def_impl(lambda *arrays: list(arrays))
_save_p.def_abstract_eval(lambda *types: list(types))
mlir.register_lowering(_save_p, lambda _, *arrays: list(arrays))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _save_p.bind(*primals), list(tangents)


def _batch(arrays: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
    return _save_p.bind(*arrays), list(axes)


def _partial_eval(
    policy: Callable[..., Any], unknown: Sequence[bool], computed: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Splits the equation between the forward and the backward pass of `jax.checkpoint`.

    Args:
      policy: the policy.
      unknown: for each operand, whether only the backward pass can compute it.
      computed: for each operand, whether the backward pass computes it. If not, it is kept.
      equation: the equation.

    Returns:
      The equations of the forward and the backward pass; for each result, whether only the backward
      pass can compute it, and whether it does so; and the values to keep, if the backward pass
      turns out to read them.
    """
    count = len(equation.outvars)
    kept = [one for one, again in zip(equation.invars, computed, strict=True) if not again]
    if any(unknown):
        return None, equation, [True] * count, [True] * count, kept
    forward = backward = equation
    if not kept and policy in AUTOMATIC_POLICIES:
        result, inner, _ = equation.invars
        saved = Var(inner.aval)
        forward = equation.replace(outvars=[*equation.outvars[:2], saved])
        backward = equation.replace(invars=[result, inner, saved])
        kept = [saved]
    return forward, backward, [False] * count, [True] * count, kept


def _prune(used: Sequence[bool], *context: Any) -> tuple[list[bool], Any]:
    """Returns which operands the used results need, and the equation with these operands alone."""
    *_, equation = context
    if not any(used):
        return [False] * len(equation.invars), None
    result, inner, saved = equation.invars
    if not used[0]:
        return [False, False, True], equation.replace(invars=[saved] * 3)
    # The result is computed, so inner is too.
    inner = inner if any(used[1:]) else result
    return [True, any(used[1:]), False], equation.replace(invars=[result, inner, inner])


def named_copy(result: jax.Array, copy: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """Returns (result, copy), two equal arrays, as `jax.ad_checkpoint.checkpoint_name(result,
    name)`, except that `jax.checkpoint` keeps the copy. A kernel that writes a result twice writes
    the second one into the stack of a scan, into which XLA would copy the first, since others read
    it."""
    result, copy = _copy_p.bind(result, copy, name=name)
    return result, copy


# (result, copy) to themselves. If the copy is kept, the backward pass reads it as the result.
_copy_p = Primitive("name_dora_copy")
_copy_p.multiple_results = True
_copy_p.def_impl(lambda *arrays, name: list(arrays))
_copy_p.def_abstract_eval(lambda *types, name: list(types))
mlir.register_lowering(_copy_p, lambda _, *arrays, name: list(arrays))


def _split_copy(
    policy: Callable[..., Any], unknown: Sequence[bool], computed: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Splits the equation, as `_partial_eval`."""
    kept = [one for one, again in zip(equation.invars, computed, strict=True) if not again]
    if any(unknown):
        return None, equation, [True] * 2, [True] * 2, kept
    if policy(_copy_p, *(one.aval for one in equation.invars), **equation.params) is not True:
        return equation, equation, [False] * 2, [True] * 2, kept
    result, copy = equation.outvars
    backward = equation.replace(invars=[copy] * 2, outvars=[result, Var(copy.aval)])
    return equation, backward, [False] * 2, [True, False], [copy]


def _name_tangents(primals: Sequence[Any], tangents: Sequence[Any], name: str) -> tuple[Any, Any]:
    return _copy_p.bind(*primals, name=name), list(tangents)


def _name_batch(arrays: Sequence[Any], axes: Sequence[Any], name: str) -> tuple[Any, Any]:
    return _copy_p.bind(*arrays, name=name), list(axes)


ad.primitive_jvps[_copy_p] = _name_tangents
batching.primitive_batchers[_copy_p] = _name_batch
partial_eval.partial_eval_jaxpr_custom_rules[_copy_p] = _split_copy
ad.primitive_jvps[_save_p] = _jvp
batching.primitive_batchers[_save_p] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[_save_p] = _partial_eval
partial_eval.dce_rules[_save_p] = _prune
