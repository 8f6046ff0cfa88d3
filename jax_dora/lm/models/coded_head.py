"""The output head in FP8 for the loss of a model whose products are in FP8, forward and backward.

It is multiplied by its codes as frozen matrices are in `jax_dora.quantisation`; its gradient is a
product in the head's dtype.
"""

from typing import Any

from flax import nnx

from jax_dora.ops import is_quantised
from jax_dora.quantisation import ForwardCodes, forward_codes


def is_coded(model: Any) -> bool:
    """Returns whether the loss of a `CausalLM` multiplies by its head in FP8: all projections of
    its layers quantise gradients, and the head is frozen, not quantised, without a bias, and not
    the embedding."""
    head = model.lm_head
    if type(head) is not nnx.Linear or type(head.kernel) is not nnx.Param or head.bias is not None:
        return False
    layers = (one for _, one in nnx.iter_modules(model.model.layers) if hasattr(one, "kernel"))
    is_plain = not is_quantised(head.kernel.get_value())
    return is_plain and all(getattr(layer, "bwd_qtype", None) for layer in layers)


def codes_of(model: Any) -> ForwardCodes | None:
    """Returns the codes of a `CausalLM`'s head if `is_coded`, else None."""
    return forward_codes(model.lm_head.kernel[...]) if is_coded(model) else None
