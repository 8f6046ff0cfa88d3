"""Products x W of few rows of x with a quantised W, as in decoding, without an adapter.

The Mosaic kernels of `few_rows` read the quantised bytes and no dense W. Where they do not support
a call, XLA multiplies by a dense copy of W. The gradient is that of the dense product.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops import choose, quantised
from jax_dora.ops.mosaic import few_rows
from jax_dora.ops.operands import Static
from jax_dora.ops.primitive import call_differentiable
from jax_dora.ops.reduction import dot_general, static_precision
from jax_dora.ops.row_wise import Product
from jax_dora.ops.shard import Op, Shard

MOST_ROWS = few_rows.MOST_ROWS


def product(operands: Product, precision: lax.PrecisionLike = None) -> jax.Array:
    """Returns x W [..., out] in x's dtype.

    Args:
      operands: x [..., in] with at most `MOST_ROWS` rows, and a quantised kernel [in, out].
      precision: the precision of a dense product, as in `jax.lax.dot_general`.
    """
    static = Static("quantised_product", None, static_precision(precision))
    (y,) = call_differentiable(OP, _define, static, operands)
    return y


def _run(static: Static, shard: Shard, operands: Product) -> tuple[jax.Array]:
    x, kernel = operands
    in_features, out = kernel.shape
    rows, form = x.size // max(in_features, 1), quantised.format_of(kernel)
    call = few_rows, (rows, in_features, out, 0, form, x.dtype)
    choice = choose.choose(static.op, static.implementation, call, optional=True)
    if choice is None:
        return (shard.sum(_define(static, operands)[0]),)
    y = choice.launch(x, kernel.qvalue, kernel.scale, None, None, None, jnp.float32(1))
    return (shard.sum(y),)


OP = Op("quantised_product", _run, Product("t i", "i o"), ("t o",), "i", is_projection=True)


def _define(static: Static, operands: Product) -> tuple[jax.Array]:
    def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return dot_general(static.precision, x, kernel, (-1, 0))

    return (quantised.apply_dense(multiply, *operands),)
