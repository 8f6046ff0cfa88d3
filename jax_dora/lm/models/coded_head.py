"""The output head in FP8 for the loss of a model whose products are in FP8, forward and backward.

    logits = (x̂ Ŵ) ∘ (s_x ⊗ s_w)      dx = dlogits Wᵀ

as in `row_scaled`, with W's codes from the frozen head as it is stored. The gradient is a product
in the head's dtype.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dora.layers.quantised_kernel import formats_of
from jax_dora.ops import is_quantised, row_scaled
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.rounding import make, round_to


class HeadCodes(NamedTuple):
    """The codes float8_e4m3fn[vocab, hidden] of a head, with one scale, f32[vocab], for each
    token. The features that a product sums over are contiguous, as the tensor cores read them."""

    codes: jax.Array
    scales: jax.Array


def is_coded(model: Any) -> bool:
    """Returns whether the loss of a `CausalLM` multiplies by its head in FP8: all projections of
    its layers quantise gradients, and the head is frozen, not quantised, without a bias, and not
    the embedding."""
    head = model.lm_head
    if type(head) is not nnx.Linear or type(head.kernel) is not nnx.Param or head.bias is not None:
        return False
    layers = (one for _, one in nnx.iter_modules(model.model.layers) if hasattr(one, "kernel"))
    is_plain = not is_quantised(head.kernel.get_value())
    return is_plain and all(formats_of(layer)["bwd_qtype"] for layer in layers)


def codes_of(model: Any) -> HeadCodes | None:
    """Returns the codes of a `CausalLM`'s head if `is_coded`, else None."""
    if not is_coded(model):
        return None
    rows = jax.lax.stop_gradient(model.lm_head.kernel[...]).T
    coded = round_to(rows, row_scaled.QTYPE, (1, rows.shape[1]), jnp.float32)
    return HeadCodes(coded.qvalue, coded.scale[:, 0])


@jax.custom_vjp
def logits(hidden: jax.Array, kernel: jax.Array, coded: HeadCodes) -> jax.Array:
    """Returns the logits f32[rows, vocab] of hidden [rows, features]. The gradient of `hidden` is
    that of the kernel [features, vocab]; the others have none."""
    weight = make(coded.codes.T, coded.scales[None], row_scaled.QTYPE)
    return row_scaled.sums(row_scaled.coded(hidden), weight, Shard()).scaled


def _forward(
    hidden: jax.Array, kernel: jax.Array, coded: HeadCodes
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return logits(hidden, kernel, coded), (hidden[:0], kernel)


def _backward(kept: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, None, None]:
    like, kernel = kept
    return jnp.matmul(d.astype(like.dtype), kernel.astype(like.dtype).T), None, None


logits.defvjp(_forward, _backward)
