"""Flax layers over quantised kernels, by the attributes that Flax has for custom arithmetic.

`nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum` and `nnx.Conv` store their dtype promotion and their
product as attributes. The functions below replace them. They dequantise the kernel for the product,
and again for the product's gradient, except for few rows, as in decoding, where kernels read the
codes; with plain arrays they do what Flax's functions do.

A layer whose `dot_general` is `dot_general_by_rows` quantises its activations too. Nothing else
records that, neither in a base layer nor in a DoRA layer.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from jax_dora.ops import mesh as meshes
from jax_dora.ops import quantised, row_wise, weight_only
from jax_dora.ops.reduction import static_precision

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv)


def dtype_carrier(array: Any) -> Any:
    """Returns the array whose dtype takes part in promotion: the scales of a quantised array, or
    the array itself."""
    return array.scale if quantised.is_quantised(array) else array


def promote_dtype(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Returns the arrays cast to one dtype by Flax's rules. Quantised arrays are not cast."""
    promoted = dtypes.promote_dtype(tuple(map(dtype_carrier, args)), dtype=dtype, inexact=inexact)
    pairs = zip(args, promoted, strict=True)
    return tuple(one if quantised.is_quantised(one) else cast for one, cast in pairs)


def dot_general(
    lhs: jax.Array,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    out_sharding: Any = None,
    **kwargs: Any,
) -> jax.Array:
    """Returns `lax.dot_general(lhs, rhs, ...)`, where rhs may be quantised. Few rows of lhs are
    multiplied without a dense copy of rhs, if that is supported."""
    options = {"precision": precision, "out_sharding": out_sharding}
    (x_contracted, contracted), (batched, _) = dimension_numbers
    if quantised.is_quantised(rhs) and not (kwargs or batched):
        rows = math.prod(lhs.shape) // max(math.prod(lhs.shape[i] for i in x_contracted), 1)
        # Other orders of the kernel's axes would require a transposed copy.
        if rows <= weight_only.MOST_ROWS and tuple(contracted) == (*range(len(contracted)),):

            def multiply(operands: row_wise.Product) -> jax.Array:
                return weight_only.product(operands, precision)

            return _by_matrix(multiply, lhs, rhs, dimension_numbers, out_sharding)

    def dense_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.dot_general(x, kernel, dimension_numbers, **options, **kwargs)

    return quantised.apply_dense(dense_product, lhs, rhs)


def dot_general_by_rows(
    lhs: jax.Array,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Returns `dot_general` without batch axes. For a quantised kernel [*in, *out] it is an FP8
    product by `row_wise`."""
    if not quantised.is_quantised(rhs):
        options = {"precision": precision, "out_sharding": out_sharding}
        return lax.dot_general(lhs, rhs, dimension_numbers, **options)

    def multiply(operands: row_wise.Product) -> jax.Array:
        product = meshes.differentiable(row_wise.linear)
        return product(static_precision(precision), meshes.vary_alike(operands))

    return _by_matrix(multiply, lhs, rhs, dimension_numbers, out_sharding)


def _by_matrix(
    multiply: Callable[[row_wise.Product], jax.Array],
    lhs: jax.Array,
    rhs: Any,
    dimension_numbers: Any,
    out_sharding: Any,
) -> jax.Array:
    """Returns `dot_general` without batch axes of a quantised rhs, by a product with a matrix.

    Args:
      multiply: returns the product of x [..., in] and a quantised kernel [in, out].
    """
    (x_contracted, kernel_contracted), _ = dimension_numbers
    rows = [axis for axis in range(lhs.ndim) if axis not in x_contracted]
    columns = [axis for axis in range(rhs.ndim) if axis not in kernel_contracted]
    groups = tuple(kernel_contracted), tuple(columns)

    def multiply_matrix(operands: row_wise.Product) -> jax.Array:
        x, kernel = operands
        x = x.transpose(*rows, *x_contracted)
        lead, out = x.shape[: len(rows)], [kernel.shape[axis] for axis in columns]
        matrix = quantised.as_matrices(kernel, kernel.shape, groups)
        y = multiply(row_wise.Product(x.reshape(*lead, matrix.shape[0]), matrix))
        return y.reshape(*lead, *out)

    operands = row_wise.Product(lhs, rhs)
    mesh = meshes.explicit(lhs, rhs.qvalue)
    if mesh is None:
        return multiply_matrix(operands)
    if out_sharding is None:
        x, kernel = meshes.spec(lhs), meshes.spec(rhs.qvalue)
        out_sharding = jax.P(*(x[axis] for axis in rows), *(kernel[axis] for axis in columns))
    spec = getattr(out_sharding, "spec", out_sharding)
    return meshes.with_auto_axes(multiply_matrix, mesh, spec)(operands)


def einsum(equation: str, lhs: jax.Array, rhs: Any, **kwargs: Any) -> jax.Array:
    """Returns `jnp.einsum(equation, lhs, rhs, ...)`, where rhs may be quantised."""
    return quantised.apply_dense(lambda x, w: jnp.einsum(equation, x, w, **kwargs), lhs, rhs)


def convolve(lhs: jax.Array, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """Returns `lax.conv_general_dilated(lhs, rhs, ...)`, where rhs may be quantised."""
    convolved = lax.conv_general_dilated
    return quantised.apply_dense(lambda x, w: convolved(x, w, *args, **kwargs), lhs, rhs)


ARITHMETIC = {
    "promote_dtype": promote_dtype,
    "dot_general": dot_general,
    "einsum_op": einsum,
    "conv_general_dilated": convolve,
}
ROW_WISE_ARITHMETIC = {"dot_general": dot_general_by_rows}


def compute_quantised(layer: Any, act_qtype: str | None = None) -> None:
    """Makes a layer, whose class is one of `LAYERS`, compute with a quantised kernel, in place.

    Args:
      act_qtype: the format that activations are quantised to, as in `jax_dora.ops.dora_linear`.
    """
    for name, function in (ARITHMETIC | ROW_WISE_ARITHMETIC if act_qtype else ARITHMETIC).items():
        if hasattr(layer, name):
            setattr(layer, name, function)


def act_qtype_of(layer: Any) -> str | None:
    """Returns the format to which a layer, adapted or not, quantises its activations; None for no
    quantisation."""
    return row_wise.QTYPE if getattr(layer, "dot_general", None) is dot_general_by_rows else None


def compute_plain(layer: Any) -> None:
    """Reverses `compute_quantised`."""
    base = next(cls for cls in LAYERS if isinstance(layer, cls))
    parameters = inspect.signature(base.__init__).parameters
    for name in ARITHMETIC:
        if hasattr(layer, name):
            setattr(layer, name, parameters[name].default)
