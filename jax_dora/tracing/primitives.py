"""Propagates a weight through JAX primitives.

The result of a primitive is either a view of the weight, or a product or lookup of it.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.tracing.weight_view import DotGeneral, Lookup, RaggedDot, Weight


def propagate(
    name: str, weight: Weight, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any] | None:
    """Returns the results of a primitive with `weight` among its operands that only changes the
    view of it, as `Weight`s; None for any other primitive."""
    match name:
        case "split":
            return _split(weight, params["sizes"], params["axis"])
        case "unstack":
            axis = params["axis"]
            parts = _split(weight, (1,) * weight.shape[axis], axis)
            shape = (*weight.shape[:axis], *weight.shape[axis + 1 :])
            return parts and [part.reshape(shape) for part in parts]
    result = _propagate_one(name, weight, operands, params)
    return None if result is None else [result]


def _propagate_one(
    name: str, weight: Weight, operands: Sequence[Any], params: dict[str, Any]
) -> Weight | None:
    """Like `propagate`, for a primitive with a single result."""
    match name:
        case "copy" | "copy_p" | "name" | "pvary" | "optimization_barrier":
            return weight
        case "sharding_constraint":  # a hint for an array that an adapted product never creates
            return weight
        case "convert_element_type" if jnp.issubdtype(params["new_dtype"], jnp.floating):
            return weight.cast(params["new_dtype"])
        case "transpose":
            return weight.transpose(params["permutation"])
        case "reshape" if params.get("dimensions") is None:
            return weight.reshape(params["new_sizes"])
        case "squeeze":
            axes = range(len(weight.view))
            dropped = {axis % len(axes) for axis in params["dimensions"]}
            return weight.transpose([axis for axis in axes if axis not in dropped])
        case "broadcast_in_dim" if math.prod(params["shape"]) == math.prod(weight.shape):
            return weight.place_axes(params["broadcast_dimensions"], len(params["shape"]))
        case "slice":
            strides = params["strides"] or (1,) * len(weight.view)
            bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
            whole = [(0, size, 1) for size in weight.shape]
            parts = {axis: part for axis, part in enumerate(bounds) if part != whole[axis]}
            return _slice(weight, lax.slice_in_dim, parts)
        case "dynamic_slice" if operands[0] is weight:
            bounds = enumerate(zip(operands[1:], params["slice_sizes"], strict=True))
            parts = {axis: part for axis, part in bounds if part[1] != weight.shape[axis]}
            return _slice(weight, lax.dynamic_slice_in_dim, parts)
        case "mul" | "div":
            return _scale(name, weight, operands)
        case "neg":
            return weight.map_linear(jnp.negative)
        case "reshard":
            return _reshard(weight, params["dst_sharding"])
    return None


def _slice(
    weight: Weight, function: Callable[..., jax.Array], parts: Mapping[int, tuple[Any, ...]]
) -> Weight | None:
    """Returns the weight sliced by a JAX function along some axes; `parts` are its arguments
    between the array and `axis`."""
    result: Weight | None = weight
    for axis, part in parts.items():
        if result is not None:
            result = result.slice_axis(
                axis, lambda array, array_axis, part=part: function(array, *part, axis=array_axis)
            )
    return result


def _scale(name: str, weight: Weight, operands: Sequence[Any]) -> Weight | None:
    """Propagates a weight through a product with one number, or a division by one number."""
    index = next(index for index, operand in enumerate(operands) if operand is weight)
    number = operands[1 - index]
    is_divisor = index == 1 and name == "div"
    if isinstance(number, Weight) or math.prod(jnp.shape(number)) != 1 or is_divisor:
        return None
    number = jnp.reshape(number, ())

    def scale(array: jax.Array) -> jax.Array:
        factor = number.astype(array.dtype)
        return array / factor if name == "div" else array * factor

    return weight.map_linear(scale)


def _reshard(weight: Weight, sharding: Any) -> Weight | None:
    """Returns the weight with its arrays, the adapter's included, sharded over other mesh axes;
    None if it cannot be propagated."""
    specs: dict[int, Any] = {}
    for axis, names in enumerate(sharding.spec):
        part = weight.whole_part(axis)
        if part is not None:
            specs[weight.origins[part]] = names
        elif names is not None:
            return None

    def reshard(name: str, array: jax.Array) -> jax.Array:
        by_axis = {weight.axis_in(name, axis): names for axis, names in specs.items()}
        spec = jax.P(*(by_axis.get(axis) for axis in range(array.ndim)))
        return jax.reshard(array, jax.sharding.NamedSharding(sharding.mesh, spec))

    return weight.with_arrays({name: reshard(name, array) for name, array in weight.arrays.items()})


def _split(weight: Weight, sizes: Sequence[int], axis: int) -> list[Any] | None:
    """Returns the consecutive parts of a weight along `axis`; None if that is not a whole axis of
    the weight."""
    ends = itertools.accumulate(sizes)
    parts = [
        _slice(weight, lax.slice_in_dim, {axis: (end - size, end)})
        for size, end in zip(sizes, ends, strict=True)
    ]
    return None if None in parts else parts


def apply_reader(
    name: str, weight: Weight, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[jax.Array] | None:
    """Returns the result of a product or a lookup of `weight` and arrays, by its reader; None for
    any other primitive, or if the reader does not support the operation."""
    handlers = {
        "dot_general": _dot_general,
        "ragged_dot_general": _ragged_dot_general,
        "gather": _gather,
    }
    result = handlers[name](weight, operands, params) if name in handlers else None
    return None if result is None else [result]


def _dot_general(weight: Weight, operands: Any, params: dict[str, Any]) -> jax.Array | None:
    first = operands[0] is weight
    x = operands[1 if first else 0]
    dtype = params["preferred_element_type"]
    if dtype is None:
        dtype = jnp.promote_types(x.dtype, weight.kernel.dtype)
    product = DotGeneral(
        params["dimension_numbers"],
        first,
        params["precision"],
        jnp.dtype(dtype),
        params.get("out_sharding"),
    )
    return weight.reader.dot_general(weight, product, x)


def _ragged_dot_general(weight: Weight, operands: Any, params: dict[str, Any]) -> jax.Array | None:
    numbers = params["ragged_dot_dimension_numbers"]
    (x_contracted, contracted), batch = numbers.dot_dimension_numbers
    x, w, sizes = operands[:3]
    is_supported = (
        w is weight
        and not any(batch)
        and tuple(numbers.lhs_ragged_dimensions) == (0,)
        and len(numbers.rhs_group_dimensions) == 1
        and params.get("group_offset") is None
        and params.get("out_sharding") is None
        and len(operands) == 3
        and (x.ndim, tuple(x_contracted)) == (2, (1,))
    )
    if not is_supported:
        return None
    dtype = params["preferred_element_type"] or jnp.promote_types(x.dtype, weight.kernel.dtype)
    ragged = RaggedDot(
        tuple(contracted),
        numbers.rhs_group_dimensions[0],
        sizes,
        params["precision"],
        jnp.dtype(dtype),
    )
    return weight.reader.ragged_dot(weight, ragged, x)


def _gather(weight: Weight, operands: Any, params: dict[str, Any]) -> jax.Array | None:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    if operands[0] is not weight or len(numbers.start_index_map) != 1:
        return None
    axis = numbers.start_index_map[0]
    row_shape = tuple(1 if i == axis else size for i, size in enumerate(weight.shape))
    takes_rows = tuple(numbers.collapsed_slice_dims) == (axis,) and tuple(sizes) == row_shape
    # The fill value for rows out of bounds is not a weight, but the lookup scales it by g. Only 0
    # and NaN stay unchanged.
    fill = params["fill_value"] or 0
    if not takes_rows or numbers.operand_batching_dims or not (fill == 0 or math.isnan(fill)):
        return None
    lookup = Lookup(axis, tuple(numbers.offset_dims), params["mode"], params["fill_value"])
    return weight.reader.lookup(weight, lookup, operands[1])
