"""Norms, and g = magnitude / norm, that rematerialisation never computes twice.

The norm of a layer is f32[out] and depends on no activation. `jax.checkpoint` without a policy
would nevertheless compute it again in the backward pass, which reads the whole kernel once more;
and g, which takes a launch for a few numbers. `save_norm` and `save_g` mark them by a primitive
whose rule for `jax.checkpoint` keeps its value, whatever the policy; so this also holds in
`nnx.remat` and `nn.remat` that the user's code or a trainer calls, and inside scans. Everywhere
else the primitive is the identity.

With JAX's option `jax_remat3` the norm is kept only by a policy that keeps its name, and g not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

NORM_NAME = "dora_norm"


def save_norm(norm: jax.Array) -> jax.Array:
    """Returns `norm`, which `jax.checkpoint` keeps; its checkpoint name is "dora_norm"."""
    return _save_p.bind(checkpoint_name(norm, NORM_NAME))


def save_g(g: jax.Array) -> jax.Array:
    """Returns `g`, which `jax.checkpoint` keeps."""
    return _save_p.bind(g)


_save_p = Primitive("save_dora_norm")
_save_p.def_impl(lambda array: array)
_save_p.def_abstract_eval(lambda array: array)
mlir.register_lowering(_save_p, lambda _, array: [array])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _save_p.bind(*primals), tangents[0]


def _batch(arrays: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
    return _save_p.bind(*arrays), axes[0]


def _partial_eval(
    is_saveable: Callable[..., Any], unknown: Sequence[bool], _: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Splits the equation between the forward and the backward pass of `jax.checkpoint`.

    Returns:
      The equations of the forward and the backward pass; for each result, whether only the backward
      pass can compute it, and whether it does so; and further values to keep. A result that only
      the forward pass computes is kept if the backward pass needs it.
    """
    del is_saveable  # the policy
    if unknown[0]:  # an outer differentiation has not computed the array yet
        return None, equation, [True], [True], []
    return equation, None, [False], [False], []


ad.primitive_jvps[_save_p] = _jvp
batching.primitive_batchers[_save_p] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[_save_p] = _partial_eval
