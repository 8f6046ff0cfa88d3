"""This operator multiplies few rows of x by a quantised W, without an adapter: y = x W.

A base layer with a quantised kernel calls it in decoding and for short prompts. The kernels of
`decode_project`, `decode_quantised` and `triton_few_rows` read the quantised bytes of W; where they
do not support a call, XLA multiplies by a dense copy of W. The gradient is that of the dense
product.
"""

from typing import Any

import jax
from jax import lax

from jax_dora.ops import quantised
from jax_dora.ops.dispatch import choose
from jax_dora.ops.dispatch.op import Op
from jax_dora.ops.dispatch.primitive import call_differentiable
from jax_dora.ops.dispatch.shard import Shard
from jax_dora.ops.dtypes import dot_general, static_precision
from jax_dora.ops.mosaic.decode import decode_project, decode_quantised
from jax_dora.ops.operands import ProductSettings
from jax_dora.ops.row_scaled import Factors
from jax_dora.ops.triton import triton_few_rows

MOST_ROWS = decode_quantised.MOST_ROWS


def linear(operands: Factors, precision: lax.PrecisionLike = None) -> jax.Array:
    """Returns x W [..., out] in x's dtype, of x with at most `MOST_ROWS` rows and a quantised
    kernel."""
    settings = ProductSettings(None, static_precision(precision))
    (y,) = call_differentiable(OP, _define, settings, operands)
    return y


def choice(implementation: str | None, rows: int, kernel: Any, dtype: Any) -> choose.Choice | None:
    """Returns the kernel for a product of `rows` rows, launched with x, qvalue and scale; None for
    a dense copy of W."""
    (in_features, out), form = kernel.shape, quantised.format_of(kernel)
    whole = (rows, in_features, out, 0, form, dtype)
    candidates = {
        decode_project: whole,
        decode_quantised: (rows, in_features, out, form, dtype),
        triton_few_rows: whole,
    }
    return choose.choose(OP.name, implementation, *candidates.items(), optional=True)


def _run(settings: ProductSettings, shard: Shard, operands: Factors) -> tuple[jax.Array]:
    x, kernel = operands
    found = choice(settings.implementation, x.size // max(kernel.shape[0], 1), kernel, x.dtype)
    if found is None:
        return (shard.sum(_define(settings, operands)[0]),)
    return (shard.sum(found.launch(x, kernel.qvalue, kernel.scale)),)


OP = Op("quantised_product", _run, Factors("t i", "i o"), ("t o",), "i", is_projection=True)


def _define(settings: ProductSettings, operands: Factors) -> tuple[jax.Array]:
    def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return dot_general(settings.precision, x, kernel, (-1, 0))

    return (quantised.apply_dense(multiply, *operands),)
