"""Flax layers over quantised kernels: their arithmetic, by the hooks that Flax has for it.

`nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum` and `nnx.Conv` take their promotion of dtypes and
their product as attributes. Those below dequantise the kernel for the product, and again for the
product's gradient, and do with plain arrays what Flax's do. A layer whose `dot_general` is
`dot_general_by_rows` quantises its activations too, adapted or not: that is all that says so.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from jax_dora.ops import mesh as meshes
from jax_dora.ops import quantised, row_wise
from jax_dora.ops.reduction import static_precision

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv)


def promoting(array: Any) -> Any:
    """Returns the array whose dtype counts where a layer promotes: a quantised one's scales."""
    return array.scale if quantised.is_quantised(array) else array


def promote_dtype(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Returns arrays cast to one dtype, as Flax's does, and quantised ones as they are."""
    promoted = dtypes.promote_dtype(tuple(map(promoting, args)), dtype=dtype, inexact=inexact)
    pairs = zip(args, promoted, strict=True)
    return tuple(one if quantised.is_quantised(one) else cast for one, cast in pairs)


def dot_general(lhs: jax.Array, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """Returns `lax.dot_general` of arrays of which the second may be quantised."""
    return quantised.apply_dense(lambda x, w: lax.dot_general(x, w, *args, **kwargs), lhs, rhs)


def dot_general_by_rows(
    lhs: jax.Array,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Returns `dot_general` without batch axes, of a quantised kernel [*in, *out] by an FP8 product
    of `row_wise`."""
    if not quantised.is_quantised(rhs):
        options = {"precision": precision, "out_sharding": out_sharding}
        return lax.dot_general(lhs, rhs, dimension_numbers, **options)
    (of_x, of_kernel), _ = dimension_numbers
    rows = [axis for axis in range(lhs.ndim) if axis not in of_x]
    columns = [axis for axis in range(rhs.ndim) if axis not in of_kernel]

    def multiply(operands: row_wise.Product) -> jax.Array:
        x, kernel = operands
        x = x.transpose(*rows, *of_x)
        lead, out = x.shape[: len(rows)], [kernel.shape[axis] for axis in columns]
        matrix = quantised.as_matrices(kernel, kernel.shape, (tuple(of_kernel), tuple(columns)))
        product = meshes.differentiable(row_wise.linear)
        operands = row_wise.Product(x.reshape(*lead, matrix.shape[0]), matrix)
        return product(static_precision(precision), meshes.vary_alike(operands)).reshape(
            *lead, *out
        )

    mesh = meshes.explicit(lhs, rhs.qvalue)
    if mesh is None:
        return multiply(row_wise.Product(lhs, rhs))
    if out_sharding is None:
        x, kernel = meshes.spec(lhs), meshes.spec(rhs.qvalue)
        out_sharding = jax.P(*(x[axis] for axis in rows), *(kernel[axis] for axis in columns))
    spec = getattr(out_sharding, "spec", out_sharding)
    return meshes.with_auto_axes(multiply, mesh, spec)(row_wise.Product(lhs, rhs))


def einsum(equation: str, lhs: jax.Array, rhs: Any, **kwargs: Any) -> jax.Array:
    """Returns `jnp.einsum` of arrays of which the second may be quantised."""
    return quantised.apply_dense(lambda x, w: jnp.einsum(equation, x, w, **kwargs), lhs, rhs)


def convolve(lhs: jax.Array, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """Returns `lax.conv_general_dilated` of arrays of which the second may be quantised."""
    convolved = lax.conv_general_dilated
    return quantised.apply_dense(lambda x, w: convolved(x, w, *args, **kwargs), lhs, rhs)


ARITHMETIC = {
    "promote_dtype": promote_dtype,
    "dot_general": dot_general,
    "einsum_op": einsum,
    "conv_general_dilated": convolve,
}
BY_ROWS = {"dot_general": dot_general_by_rows}


def compute_quantised(layer: Any, act_qtype: str | None = None) -> None:
    """Makes a layer of one of `LAYERS`, in place, one that computes with a quantised kernel.

    Args:
      act_qtype: what its activations are quantised to, as `jax_dora.ops.dora_linear`'s.
    """
    for name, function in (ARITHMETIC | BY_ROWS if act_qtype else ARITHMETIC).items():
        if hasattr(layer, name):
            setattr(layer, name, function)


def act_qtype_of(layer: Any) -> str | None:
    """Returns the format that a layer, adapted or not, quantises its activations to, or None."""
    return row_wise.QTYPE if getattr(layer, "dot_general", None) is dot_general_by_rows else None


def compute_plain(layer: Any) -> None:
    """Reverses `compute_quantised`."""
    base = next(one for one in LAYERS if isinstance(layer, one))
    parameters = inspect.signature(base.__init__).parameters
    for name in ARITHMETIC:
        if hasattr(layer, name):
            setattr(layer, name, parameters[name].default)
