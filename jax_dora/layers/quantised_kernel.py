"""Flax layers over quantised kernels, by the attributes that Flax has for custom arithmetic.

`nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum` and `nnx.Conv` store their dtype promotion and their
product as attributes. The functions below replace them. They dequantise the kernel for the product,
and again for the product's gradient. For few rows, as in decoding and for prompts, `dot_general`
and `einsum` do without that. With plain arrays all do what Flax's functions do.

A layer that quantises its activations too says so in its attribute `act_qtype`, and, if it also
quantises gradients, in `bwd_qtype`; its `dot_general` is one of `ROW_SCALED_DOTS`. Other layers
have no such attributes.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from jax_dora.layers.contraction import Contraction, why_no_projection
from jax_dora.layers.stack import Stack
from jax_dora.ops import check, quantised, row_scaled, weight_only
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.dtypes import static_precision
from jax_dora.ops.operands import ProductSettings
from jax_dora.ops.row_scaled import RowScaled

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv)


def check_kernel(kernel: Any, contraction: Contraction, stack: Stack) -> None:
    """Checks the kernel of a layer or a stack of layers, with the errors of `check.is_float` and
    `check.quantised_matrix`. The op itself cannot see the scales of a stack, which are traced, and
    does not know the layer's name."""
    if not quantised.is_quantised(kernel):
        check.is_float("kernel", kernel)
        return
    check.quantised_array("its kernel", kernel)
    layer = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(stack.layer_part(array.shape), array.dtype), kernel
    )
    matrix = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype),
        jax.eval_shape(contraction.kernel.to_matrices, layer),
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
    """Returns `lax.dot_general(lhs, rhs, ...)`, where rhs may be quantised: up to
    `weight_only.MOST_ROWS` rows are multiplied without a dense copy of rhs if possible."""
    if quantised.is_quantised(rhs) and preferred_element_type is None:
        contraction = Contraction.of_dot_general(dimension_numbers, lhs.ndim, rhs.ndim)
        if _has_few_rows(lhs, contraction):
            multiply = functools.partial(weight_only.linear, precision=precision)
            return _by_matrix(multiply, lhs, rhs, contraction, out_sharding)

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


def _has_few_rows(lhs: jax.Array, contraction: Contraction) -> bool:
    """Returns whether at most `weight_only.MOST_ROWS` rows are multiplied by the matrix that a
    quantised kernel stands for: its contracted axes come first, since other orders require a
    transposed copy."""
    pairs = zip(contraction.x, lhs.shape, strict=True)
    sizes = [size for label, size in pairs if label in contraction.rows]
    # The number of rows is unknown in some exports.
    is_few = (
        all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= weight_only.MOST_ROWS
    )
    roles = contraction.roles
    return is_few and roles.rstrip("o") == "i" * roles.count("i")


def row_scaled_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    out_sharding: Any = None,
    bwd_qtype: str | None = None,
) -> jax.Array:
    """Returns `dot_general` without batch axes. For a quantised kernel [*in, *out] it is an FP8
    product by `row_scaled`; lhs can then be `RowScaled` [..., in]."""
    if not quantised.is_quantised(rhs):
        options = {"precision": precision, "out_sharding": out_sharding}
        return lax.dot_general(lhs, rhs, dimension_numbers, **options)

    def multiply(operands: row_scaled.Factors) -> jax.Array:
        product = meshes.differentiable(row_scaled.linear)
        settings = ProductSettings(None, static_precision(precision), bwd_qtype)
        return product(settings, meshes.vary_alike(operands))

    contraction = Contraction.of_dot_general(dimension_numbers, lhs.ndim, rhs.ndim)
    return _by_matrix(multiply, lhs, rhs, contraction, out_sharding)


def _by_matrix(
    multiply: Callable[[row_scaled.Factors], jax.Array],
    lhs: Any,
    rhs: Any,
    contraction: Contraction,
    out_sharding: Any = None,
) -> jax.Array:
    """Returns a contraction without batch axes by `multiply`, the product of x [..., in] and a
    quantised kernel [in, out]; rhs is the quantised kernel."""
    inner, weight = contraction.labels("i"), contraction.weight
    shapes = [
        [operand.shape[labels.index(label)] for label in inner]
        for operand, labels in ((lhs, contraction.x), (rhs, weight))
    ]
    if shapes[0] != shapes[1]:
        raise TypeError(
            f"the contracted axes of the inputs have the sizes {shapes[0]}, and those of the "
            f"kernel {shapes[1]}; expected the same"
        )
    groups = tuple(tuple(map(weight.index, labels)) for labels in (inner, contraction.labels("o")))

    def multiply_matrix(operands: row_scaled.Factors) -> jax.Array:
        x, kernel = operands
        if isinstance(x, RowScaled):
            return multiply(operands)
        x = contraction.arrange_input(x)
        lead = x.shape[: len(contraction.rows)]
        matrix = quantised.as_matrices(kernel, kernel.shape, groups)
        y = multiply(row_scaled.Factors(x.reshape(*lead, matrix.shape[0]), matrix))
        return contraction.result(y.reshape(*lead, *(kernel.shape[axis] for axis in groups[1])))

    x = dtype_carrier(lhs)

    def spec() -> jax.sharding.PartitionSpec:
        if out_sharding is not None:
            return getattr(out_sharding, "spec", out_sharding)
        names = dict(zip(contraction.x, meshes.spec(x), strict=True))
        names |= zip(weight, meshes.spec(rhs.qvalue), strict=True)
        return jax.P(*(names[label] for label in contraction.y))

    multiply_on_mesh = meshes.on_explicit_axes(multiply_matrix, spec, x, rhs.qvalue)
    return multiply_on_mesh(row_scaled.Factors(lhs, rhs))


def einsum(equation: str, lhs: jax.Array, rhs: Any, **kwargs: Any) -> jax.Array:
    """Returns `jnp.einsum(equation, lhs, rhs, ...)`; rhs may be quantised, as in `dot_general`."""
    options = {name: value for name, value in kwargs.items() if value is not None}
    if quantised.is_quantised(rhs) and options.keys() <= {"precision"}:
        y = _few_rows_einsum(equation, lhs, rhs, options.get("precision"))
        if y is not None:
            return y
    return quantised.apply_dense(lambda x, w: jnp.einsum(equation, x, w, **kwargs), lhs, rhs)


def _few_rows_einsum(equation: str, x: jax.Array, kernel: Any, precision: Any) -> jax.Array | None:
    """Returns an einsum of few rows with a matrix or a stack of matrices; None for any other."""
    if why_no_projection(equation):
        return None
    whole = Contraction.of_einsum(equation, x.ndim)
    of_x, of_kernel, y = map("".join, (whole.x, whole.weight, whole.y))
    stacked = whole.roles.index("i")
    stack, sizes = of_kernel[:stacked], dict(zip(of_kernel, kernel.shape, strict=False))
    is_product = (
        "b" not in whole.roles
        and (len(of_x), len(of_kernel)) == (x.ndim, kernel.ndim)
        and all(sizes.get(label, size) == size for label, size in zip(of_x, x.shape, strict=True))
        and (not stack or meshes.explicit(x, kernel.qvalue) is None)
    )
    if not is_product:
        return None
    of_result = "".join(label for label in y if label not in stack)
    contraction = Contraction.of_letters(of_x, of_kernel[stacked:], of_result)
    if not _has_few_rows(x, contraction):
        return None
    product = functools.partial(weight_only.linear, precision=precision)

    def multiply(kernel: Any) -> jax.Array:
        return _by_matrix(product, x, kernel, contraction)

    for _ in stack:
        multiply = jax.vmap(multiply)
    result = multiply(quantised.with_own_scales(kernel, stacked))
    return result.transpose([(stack + of_result).index(label) for label in y])


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


def _dot_general_e4m3fn(*operands: Any, **options: Any) -> jax.Array:
    return row_scaled_dot_general(*operands, bwd_qtype="float8_e4m3fn", **options)


def _dot_general_e5m2(*operands: Any, **options: Any) -> jax.Array:
    return row_scaled_dot_general(*operands, bwd_qtype="float8_e5m2", **options)


# By the format of gradients. Layers are compared by these: unlike a `functools.partial`, a function
# stays the same object in a layer that is copied or pickled.
ROW_SCALED_DOTS = {
    None: row_scaled_dot_general,
    "float8_e4m3fn": _dot_general_e4m3fn,
    "float8_e5m2": _dot_general_e5m2,
}


def compute_quantised(
    layer: Any, act_qtype: str | None = None, bwd_qtype: str | None = None
) -> None:
    """Makes a layer, whose class is one of `LAYERS`, compute with a quantised kernel, in place;
    with `act_qtype` and `bwd_qtype` as in `jax_dora.ops.dora_linear`."""
    _forget_formats(layer)
    functions = ARITHMETIC
    if act_qtype is not None:
        layer.act_qtype = act_qtype
        functions = ARITHMETIC | {"dot_general": ROW_SCALED_DOTS[bwd_qtype]}
    if bwd_qtype is not None:
        layer.bwd_qtype = bwd_qtype
    for name, function in functions.items():
        if hasattr(layer, name):
            setattr(layer, name, function)


def _forget_formats(layer: Any) -> None:
    for name, qtype in formats_of(layer).items():
        if qtype is not None:
            delattr(layer, name)


def compute_as_stored(layer: Any) -> None:
    """Makes a layer whose kernel is quantised, by whomever, compute with it, in place, where its
    attributes are Flax's defaults."""
    if isinstance(layer, LAYERS) and quantised.is_quantised(layer.kernel.get_value()):
        for name, default in _plain_arithmetic(layer).items():
            if getattr(layer, name) is default:
                setattr(layer, name, ARITHMETIC[name])


def act_qtype_of(layer: Any) -> str | None:
    """Returns the format to which a layer, adapted or not, quantises its activations, or None."""
    return getattr(layer, "act_qtype", None)


def formats_of(layer: Any) -> dict[str, Any]:
    """Returns the formats, or None, to which a layer quantises its activations and gradients."""
    return {name: getattr(layer, name, None) for name in ("act_qtype", "bwd_qtype")}


def takes_codes(layer: Any) -> bool:
    """Returns whether a layer quantises its inputs and can be called with `RowScaled`."""
    # A subclass may compute something else with its inputs.
    can_take = type(layer) is nnx.Linear or vars(type(layer)).get("can_take_codes", False)
    return can_take and act_qtype_of(layer) is not None


def compute_plain(layer: Any) -> None:
    """Reverses `compute_quantised`, in a layer of any class."""
    if not isinstance(layer, LAYERS):
        return
    _forget_formats(layer)
    for name, default in _plain_arithmetic(layer).items():
        setattr(layer, name, default)


def _plain_arithmetic(layer: Any) -> dict[str, Any]:
    """Returns Flax's defaults for those attributes of a layer that are in `ARITHMETIC`."""
    base = next(cls for cls in LAYERS if isinstance(layer, cls))
    parameters = inspect.signature(base.__init__).parameters
    return {name: parameters[name].default for name in ARITHMETIC if hasattr(layer, name)}
