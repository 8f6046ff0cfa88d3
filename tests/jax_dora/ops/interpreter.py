"""What the tests know of Triton's interpreter."""

from typing import Any

import jax.numpy as jnp

from jax_dora.ops.triton import kernel_call
from parity import tolerances


def slack(implementation: str | None, dtype: Any) -> float:
    """Returns the factor of the error bound of a result of `dtype`: the interpreter truncates to
    bf16 instead of rounding."""
    truncates = implementation == "triton" and kernel_call.interpreted() and dtype == jnp.bfloat16
    return tolerances.TRITON_INTERPRETER_BF16 if truncates else 1.0
