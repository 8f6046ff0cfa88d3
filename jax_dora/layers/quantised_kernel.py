"""Flax layers over quantised kernels, by the attributes that Flax has for custom arithmetic.

`nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum` and `nnx.Conv` store their dtype promotion and their
product as attributes. The functions below replace them. They dequantise the kernel for the product,
and again for the product's gradient. For few rows, as in decoding and for prompts, `dot_general`
and `einsum` do without that. With plain arrays all do what Flax's functions do.

A layer that quantises its activations too says so in its attribute `act_qtype`, and its
`dot_general` is `row_scaled_dot_general`. Other layers have no such attribute.
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

from jax_dora.layers.contraction import Contraction
from jax_dora.layers.stack import Stack
from jax_dora.ops import check, quantised, row_scaled, weight_only
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.dtypes import static_precision
from jax_dora.ops.row_scaled import RowScaled

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv)


def check_kernel(kernel: Any, layout: Contraction, stack: Stack) -> None:
    """Checks the kernel of a layer, or of a stack of layers.

    The op checks the matrix [in, out] itself, but cannot see the scales of a stack, which are
    traced, and does not know the layer's name.

    Raises:
      TypeError: the kernel has another dtype than fp16, bf16, fp32 and fp64.
      TypeError, ValueError: for a quantised kernel see `jax_dora.ops.check.quantised_matrix`.
    """
    if not quantised.is_quantised(kernel):
        check.is_float("kernel", kernel)
        return
    check.quantised_array("its kernel", kernel)
    layer = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(stack.layer_part(array.shape), array.dtype), kernel
    )
    matrix = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype),
        jax.eval_shape(layout.kernel.to_matrices, layer),
    )
    check.quantised_matrix("its kernel", matrix)


def dtype_carrier(array: Any) -> Any:
    """Returns the array whose dtype takes part in promotion: the scales of a quantised array, x of
    `RowScaled`, or the array itself."""
    return array.scale if quantised.is_quantised(array) else row_scaled.plain(array)


def promote_dtype(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Returns the arrays cast to one dtype by Flax's rules. Quantised arrays are not cast."""
    promoted = dtypes.promote_dtype(tuple(map(dtype_carrier, args)), dtype=dtype, inexact=inexact)

    def is_kept(array: Any, cast: Any) -> bool:
        has_codes = isinstance(array, RowScaled) and array.dtype == cast.dtype
        return has_codes or quantised.is_quantised(array)

    pairs = zip(args, promoted, strict=True)
    return tuple(array if is_kept(array, cast) else cast for array, cast in pairs)


def dot_general(
    lhs: jax.Array,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """Returns `lax.dot_general(lhs, rhs, ...)`, where rhs may be quantised.

    Up to `weight_only.MOST_ROWS` rows are multiplied without a dense copy of rhs, if that is
    supported.
    """
    is_quantised, has_dtype = quantised.is_quantised(rhs), preferred_element_type is not None
    if is_quantised and not has_dtype and _has_few_rows(lhs, rhs, dimension_numbers):

        def multiply(operands: row_scaled.Product) -> jax.Array:
            return weight_only.product(operands, precision)

        return _by_matrix(multiply, lhs, rhs, dimension_numbers, out_sharding)

    def multiply_dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.dot_general(
            x,
            kernel,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )

    return quantised.apply_dense(multiply_dense, lhs, rhs)


def _axes(dimension_numbers: Any) -> list[list[tuple[int, ...]]]:
    """Returns the contracted and the batch axes of both operands."""
    return [
        [(axes,) if isinstance(axes, int) else tuple(axes) for axes in pair]
        for pair in dimension_numbers
    ]


def _has_few_rows(lhs: jax.Array, rhs: Any, dimension_numbers: Any) -> bool:
    """Returns whether at most `weight_only.MOST_ROWS` rows are multiplied by the matrix that a
    quantised rhs stands for.

    rhs's contracted axes come first: other orders would require a transposed copy.
    """
    (x_axes, kernel_axes), (batched, _) = _axes(dimension_numbers)
    sizes = [size for axis, size in enumerate(lhs.shape) if axis not in x_axes]
    # The number of rows is unknown in some exports.
    is_few = (
        all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= weight_only.MOST_ROWS
    )
    return is_few and not batched and [*kernel_axes] == [*range(len(kernel_axes))]


def row_scaled_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Returns `dot_general` without batch axes. For a quantised kernel [*in, *out] it is an FP8
    product by `row_scaled`; lhs can then be `RowScaled` [..., in]."""
    if not quantised.is_quantised(rhs):
        options = {"precision": precision, "out_sharding": out_sharding}
        return lax.dot_general(lhs, rhs, dimension_numbers, **options)

    def multiply(operands: row_scaled.Product) -> jax.Array:
        product = meshes.differentiable(row_scaled.linear)
        return product(static_precision(precision), meshes.vary_alike(operands))

    return _by_matrix(multiply, lhs, rhs, dimension_numbers, out_sharding)


def _by_matrix(
    multiply: Callable[[row_scaled.Product], jax.Array],
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    out_sharding: Any,
) -> jax.Array:
    """Returns `dot_general` without batch axes of a quantised rhs, by a product with a matrix.

    Args:
      multiply: returns the product of x [..., in] and a quantised kernel [in, out].
    """
    (x_contracted, kernel_contracted), _ = _axes(dimension_numbers)
    shapes = [
        [operand.shape[axis] for axis in axes]
        for operand, axes in ((lhs, x_contracted), (rhs, kernel_contracted))
    ]
    if shapes[0] != shapes[1]:
        raise TypeError(
            f"the contracted axes of the inputs have the sizes {shapes[0]}, and those of the "
            f"kernel {shapes[1]}; expected the same"
        )
    rows = [axis for axis in range(lhs.ndim) if axis not in x_contracted]
    columns = [axis for axis in range(rhs.ndim) if axis not in kernel_contracted]
    groups = tuple(kernel_contracted), tuple(columns)

    def multiply_matrix(operands: row_scaled.Product) -> jax.Array:
        x, kernel = operands
        if isinstance(x, RowScaled):
            return multiply(operands)
        x = x.transpose(*rows, *x_contracted)
        lead, out = x.shape[: len(rows)], [kernel.shape[axis] for axis in columns]
        matrix = quantised.as_matrices(kernel, kernel.shape, groups)
        y = multiply(row_scaled.Product(x.reshape(*lead, matrix.shape[0]), matrix))
        return y.reshape(*lead, *out)

    x = dtype_carrier(lhs)

    def spec() -> jax.sharding.PartitionSpec:
        if out_sharding is not None:
            return getattr(out_sharding, "spec", out_sharding)
        of_x, of_kernel = meshes.spec(x), meshes.spec(rhs.qvalue)
        return jax.P(*(of_x[axis] for axis in rows), *(of_kernel[axis] for axis in columns))

    multiply_on_mesh = meshes.on_explicit_axes(multiply_matrix, spec, x, rhs.qvalue)
    return multiply_on_mesh(row_scaled.Product(lhs, rhs))


def einsum(equation: str, lhs: jax.Array, rhs: Any, **kwargs: Any) -> jax.Array:
    """Returns `jnp.einsum(equation, lhs, rhs, ...)`, where rhs may be quantised.

    Up to `weight_only.MOST_ROWS` rows are multiplied without a dense copy of rhs, if that is
    supported.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    if quantised.is_quantised(rhs) and options.keys() <= {"precision"}:
        y = _few_rows_einsum(equation, lhs, rhs, options.get("precision"))
        if y is not None:
            return y
    return quantised.apply_dense(lambda x, w: jnp.einsum(equation, x, w, **kwargs), lhs, rhs)


def _few_rows_einsum(equation: str, x: jax.Array, kernel: Any, precision: Any) -> jax.Array | None:
    """Returns an einsum that is a product of few rows with a matrix, or with a stack of matrices;
    None for any other einsum."""
    contraction = Contraction.of_einsum(equation, x.ndim)
    of_x, of_kernel, out = letters = contraction.x, contraction.weight, contraction.y
    inner = contraction.labels("i")
    is_product = (
        "".join((*of_x, *of_kernel, *out)).isalpha()
        and (len(of_x), len(of_kernel)) == (x.ndim, kernel.ndim)
        and all(len(set(own)) == len(own) for own in letters)
        and {*out} == {*of_x} ^ {*of_kernel}
        and inner
        and "i" * len(inner) in contraction.roles
    )
    if not is_product:
        return None
    x_axes, stacked = [of_x.index(one) for one in inner], contraction.roles.index("i")
    end = stacked + len(inner)
    numbers: Any = (x_axes, range(len(inner))), ((), ())
    can_stack = not stacked or meshes.explicit(x, kernel.qvalue) is None
    has_same_sizes = [x.shape[axis] for axis in x_axes] == [*kernel.shape[stacked:end]]
    if not (can_stack and has_same_sizes and _has_few_rows(x, kernel, numbers)):
        return None

    def multiply(kernel: Any) -> jax.Array:
        return dot_general(x, kernel, numbers, precision)

    for _ in range(stacked):
        multiply = jax.vmap(multiply)
    order = [*of_kernel[:stacked], *contraction.rows, *of_kernel[end:]]
    y = multiply(quantised.with_own_scales(kernel, stacked))
    return y.transpose([order.index(one) for one in out])


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
ROW_SCALED_ARITHMETIC = {"dot_general": row_scaled_dot_general}


def compute_quantised(layer: Any, act_qtype: str | None = None) -> None:
    """Makes a layer, whose class is one of `LAYERS`, compute with a quantised kernel, in place.

    Args:
      act_qtype: the format that activations are quantised to, as in `jax_dora.ops.dora_linear`.
    """
    _forget_act_qtype(layer)
    functions = ARITHMETIC
    if act_qtype is not None:
        layer.act_qtype = act_qtype
        functions = ARITHMETIC | ROW_SCALED_ARITHMETIC
    for name, function in functions.items():
        if hasattr(layer, name):
            setattr(layer, name, function)


def _forget_act_qtype(layer: Any) -> None:
    if act_qtype_of(layer) is not None:
        del layer.act_qtype


def compute_as_stored(layer: Any) -> None:
    """Makes a layer whose kernel is quantised, by whomever, compute with it, in place.

    Attributes that differ from Flax's defaults stay as they are.
    """
    if isinstance(layer, LAYERS) and quantised.is_quantised(layer.kernel.get_value()):
        for name, default in _plain_arithmetic(layer).items():
            if getattr(layer, name) is default:
                setattr(layer, name, ARITHMETIC[name])


def act_qtype_of(layer: Any) -> str | None:
    """Returns the format to which a layer, adapted or not, quantises its activations; None for no
    quantisation."""
    return getattr(layer, "act_qtype", None)


def takes_codes(layer: Any) -> bool:
    """Returns whether a layer quantises its inputs and can be called with `RowScaled`."""
    # A subclass may compute something else with its inputs.
    can_take = type(layer) is nnx.Linear or vars(type(layer)).get("can_take_codes", False)
    return can_take and act_qtype_of(layer) is not None


def compute_plain(layer: Any) -> None:
    """Reverses `compute_quantised`."""
    _forget_act_qtype(layer)
    for name, default in _plain_arithmetic(layer).items():
        setattr(layer, name, default)


def _plain_arithmetic(layer: Any) -> dict[str, Any]:
    """Returns Flax's defaults for those attributes of a layer that are in `ARITHMETIC`."""
    base = next(cls for cls in LAYERS if isinstance(layer, cls))
    parameters = inspect.signature(base.__init__).parameters
    return {name: parameters[name].default for name in ARITHMETIC if hasattr(layer, name)}
