"""What each primitive makes of a weight: an array that is the weight's still, or a product."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.weights.operations import Lookup, Product, Ragged
from jax_dora.weights.weight import Weight

Step = Callable[[str, Weight, Sequence[Any], dict[str, Any]], Weight | None]


def follow(
    name: str, weight: Weight, operands: Sequence[Any], params: dict[str, Any]
) -> Weight | None:
    """Returns what the primitive makes of `weight` where that is still the weight's array.

    Args:
      name: of the primitive.
      operands: one of which is `weight`.
      params: of the primitive.
    """
    step = _STEPS.get(name)
    return None if step is None else step(name, weight, operands, params)


def _convert(name: str, weight: Weight, operands: Any, params: dict[str, Any]) -> Weight | None:
    dtype = params["new_dtype"]
    return weight.cast(dtype) if jnp.issubdtype(dtype, jnp.floating) else None


def _same(name: str, weight: Weight, operands: Any, params: dict[str, Any]) -> Weight | None:
    return weight


def _transpose(name: str, weight: Weight, operands: Any, params: dict[str, Any]) -> Weight | None:
    return weight.transpose(params["permutation"])


def _reshape(name: str, weight: Weight, operands: Any, params: dict[str, Any]) -> Weight | None:
    if params.get("dimensions") is not None:
        return None
    return weight.reshape(params["new_sizes"])


def _squeeze(name: str, weight: Weight, operands: Any, params: dict[str, Any]) -> Weight | None:
    dropped = {axis % len(weight.view) for axis in params["dimensions"]}
    return weight.reshape([n for axis, n in enumerate(weight.shape) if axis not in dropped])


def _broadcast(name: str, weight: Weight, operands: Any, params: dict[str, Any]) -> Weight | None:
    is_as_large = math.prod(params["shape"]) == math.prod(weight.shape)
    return weight.reshape(params["shape"]) if is_as_large else None


def _slice(name: str, weight: Weight, operands: Any, params: dict[str, Any]) -> Weight | None:
    bounds = zip(params["start_indices"], params["limit_indices"], strict=True)
    strides = params["strides"] or (1,) * len(weight.view)
    one: Weight | None = weight
    for axis, ((start, limit), stride) in enumerate(zip(bounds, strides, strict=True)):
        if one is None:
            return None
        if (start, limit, stride) != (0, one.shape[axis], 1):
            one = one.indexed(
                axis,
                lambda array, place, start=start, limit=limit, stride=stride: lax.slice_in_dim(
                    array, start, limit, stride, axis=place
                ),
            )
    return one


def _dynamic_slice(
    name: str, weight: Weight, operands: Sequence[Any], params: dict[str, Any]
) -> Weight | None:
    if operands[0] is not weight:
        return None
    one: Weight | None = weight
    for axis, (start, size) in enumerate(zip(operands[1:], params["slice_sizes"], strict=True)):
        if one is None:
            return None
        if size != one.shape[axis]:
            one = one.indexed(
                axis,
                lambda array, place, start=start, size=size: lax.dynamic_slice_in_dim(
                    array, start, size, axis=place
                ),
            )
    return one


def _times_scalar(
    name: str, weight: Weight, operands: Sequence[Any], params: dict[str, Any]
) -> Weight | None:
    """A product with one number, or a quotient by it."""
    place = next(place for place, one in enumerate(operands) if one is weight)
    number = operands[1 - place]
    if isinstance(number, Weight) or math.prod(jnp.shape(number)) != 1:
        return None
    if place == 1 and name == "div":
        return None
    number = jnp.reshape(number, ())

    def times(array: jax.Array) -> jax.Array:
        one = number.astype(array.dtype)
        return array / one if name == "div" else array * one

    return weight.scaled(times)


def _negative(name: str, weight: Weight, operands: Any, params: dict[str, Any]) -> Weight | None:
    return weight.scaled(jnp.negative)


def _reshard(name: str, weight: Weight, operands: Any, params: dict[str, Any]) -> Weight | None:
    """The array over other axes of a mesh, or left to XLA: its adapter is sharded as it is."""
    sharding = params["dst_sharding"]
    specs: dict[int | None, Any] = {}
    for axis, names in enumerate(sharding.spec):
        whole = weight.whole(axis)
        if names is not None and whole is None:
            return None
        specs[whole] = names

    def over_mesh(name: str, array: jax.Array) -> jax.Array:
        places = {
            weight.place(name, axis): names for axis, names in specs.items() if axis is not None
        }
        spec = jax.P(*(places.get(axis) for axis in range(array.ndim)))
        return jax.reshard(array, jax.sharding.NamedSharding(sharding.mesh, spec))

    arrays = {name: over_mesh(name, array) for name, array in weight.arrays.items()}
    return dataclasses.replace(weight, arrays=arrays)


def split(weight: Weight, sizes: Sequence[int], axis: int) -> list[Any] | None:
    """Returns the parts of the array, one after the other along `axis`; None where it is not the
    whole of an axis of the weight."""
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    parts = [
        weight.indexed(
            axis,
            lambda array, place, start=end - size, end=end: lax.slice_in_dim(
                array, start, end, axis=place
            ),
        )
        for size, end in zip(sizes, ends, strict=True)
    ]
    return None if None in parts else parts


_STEPS: dict[str, Step] = {
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "name": _same,
    "pvary": _same,
    "reduce_precision": lambda *_: None,
    "sharding_constraint": _same,  # a hint, of an array that an adapted product does not make
    "optimization_barrier": _same,
    "reshard": _reshard,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "mul": _times_scalar,
    "div": _times_scalar,
    "neg": _negative,
}


def read(
    name: str, weight: Weight, operands: Sequence[Any], params: dict[str, Any]
) -> jax.Array | None:
    """Returns what a product or a lookup makes of `weight`, by its reader; None where the primitive
    is neither, or has no such form.

    Args:
      operands: arrays, but for `weight`.
    """
    if name == "dot_general":
        return _dot_general(weight, operands, params)
    if name == "ragged_dot_general":
        return _ragged_dot_general(weight, operands, params)
    if name == "gather":
        return _gather(weight, operands, params)
    return None


def _dot_general(weight: Weight, operands: Any, params: dict[str, Any]) -> jax.Array | None:
    first = operands[0] is weight
    x = operands[1 if first else 0]
    contracted, batch = params["dimension_numbers"]
    if first:
        contracted, batch = contracted[::-1], batch[::-1]
    dtype = params["preferred_element_type"]
    if dtype is None:
        dtype = jnp.promote_types(x.dtype, weight.kernel.dtype)
    product = Product(
        tuple(contracted[1]),
        tuple(batch[1]),
        tuple(contracted[0]),
        tuple(batch[0]),
        first,
        params["precision"],
        jnp.dtype(dtype),
        params.get("out_sharding"),
    )
    return weight.reader.product(weight, product, x)


def _ragged_dot_general(weight: Weight, operands: Any, params: dict[str, Any]) -> jax.Array | None:
    numbers = params["ragged_dot_dimension_numbers"]
    (x_contracted, contracted), batch = numbers.dot_dimension_numbers
    x, w, sizes = operands[:3]
    plain = (
        w is weight
        and not any(batch)
        and tuple(numbers.lhs_ragged_dimensions) == (0,)
        and len(numbers.rhs_group_dimensions) == 1
        and params.get("group_offset") is None
        and params.get("out_sharding") is None
        and len(operands) == 3
        and (x.ndim, tuple(x_contracted)) == (2, (1,))
    )
    if not plain:
        return None
    dtype = params["preferred_element_type"] or jnp.promote_types(x.dtype, weight.kernel.dtype)
    ragged = Ragged(
        tuple(contracted),
        numbers.rhs_group_dimensions[0],
        sizes,
        params["precision"],
        jnp.dtype(dtype),
    )
    return weight.reader.ragged(weight, ragged, x)


def _gather(weight: Weight, operands: Any, params: dict[str, Any]) -> jax.Array | None:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    if operands[0] is not weight or len(numbers.start_index_map) != 1:
        return None
    axis = numbers.start_index_map[0]
    whole = tuple(1 if one == axis else n for one, n in enumerate(weight.shape))
    rows = tuple(numbers.collapsed_slice_dims) == (axis,) and tuple(sizes) == whole
    if not rows or numbers.operand_batching_dims:
        return None
    lookup = Lookup(axis, tuple(numbers.offset_dims), params["mode"], params["fill_value"])
    return weight.reader.lookup(weight, lookup, operands[1])
