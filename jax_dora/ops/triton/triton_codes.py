"""Quantised kernels as the Triton kernels take them (`dora_common.triton.codes`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.mosaic.hopper.codebook import numbers
from jax_dora.ops.quantised import bits


def arguments(qvalue: jax.Array, scales: jax.Array) -> dict[str, Any]:
    """Returns the kernels' arguments that describe q [in, out] with scales [in / t, out]."""
    in_features, out = qvalue.shape
    levels, codes = None, "int8"
    if bits(qvalue.dtype) == 4:
        levels, codes = jnp.asarray(numbers(qvalue.dtype), jnp.float32), "int4"
        qvalue = lax.bitcast_convert_type(qvalue.reshape(in_features, out // 2, 2), jnp.uint8)
    elif qvalue.dtype != jnp.int8:
        codes, qvalue = "float8", lax.bitcast_convert_type(qvalue, jnp.uint8)
    return {
        "weight_ptr": qvalue,
        "levels_ptr": levels,
        "scales_ptr": scales,
        "CODES": codes,
        "RUN": in_features // scales.shape[0],
    }
