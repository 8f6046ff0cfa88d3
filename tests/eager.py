"""Lets NumPy move the elements of single arrays in tests: XLA needs 0.03 s for each new shape."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src.array import ArrayImpl
from jax.sharding import SingleDeviceSharding

# Of these dtypes each is converted to each as by XLA, but not from a float to an integer.
_DTYPES = {"bool", "int8", "int32", "uint8", "uint32", "float16", "bfloat16", "float32"}


def _broadcast(x: np.ndarray, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _convert(x: np.ndarray, new_dtype: Any, **_: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(new_dtype)


MOVES: dict[Any, Callable[..., np.ndarray]] = {
    lax.broadcast_in_dim_p: _broadcast,
    lax.convert_element_type_p: _convert,
    lax.reshape_p: lambda x, new_sizes, **_: x.reshape(new_sizes),
    lax.squeeze_p: lambda x, dimensions, **_: x.squeeze(dimensions),
    lax.transpose_p: lambda x, permutation, **_: x.transpose(permutation),
}


def move_with_numpy() -> None:
    """Replaces these primitives by NumPy's functions outside of traced programs."""
    for primitive, move in MOVES.items():
        primitive.def_impl(functools.partial(_moved, move, primitive.impl))


def _moved(move: Any, original: Any, operand: Any, *others: Any, **params: Any) -> Any:
    if others or not _is_plain(operand, **params):
        return original(operand, *others, **params)
    # A copy, because the operand may be donated.
    values = np.array(move(np.asarray(operand), **params), order="C")
    is_committed = isinstance(operand, ArrayImpl) and operand.committed
    return jax.device_put(values, operand.sharding if is_committed else None)


def _is_plain(
    operand: Any,
    *,
    new_dtype: Any = None,
    weak_type: bool = False,
    sharding: Any = None,
    dimensions: Any = None,
    **_: Any,
) -> bool:
    """Returns whether a result is an array of one device and of a dtype of its own."""
    if (
        str(getattr(operand, "dtype", "")) not in _DTYPES
        or not jax.sharding.get_abstract_mesh().empty
    ):
        return False
    if weak_type or sharding is not None:
        return False
    if new_dtype is not None:
        to_integer = np.dtype(new_dtype).kind in "iu" and operand.dtype.kind not in "biu"
        if str(np.dtype(new_dtype)) not in _DTYPES or to_integer:
            return False
    if not isinstance(operand, ArrayImpl):
        return isinstance(operand, np.ndarray | np.generic)
    is_weak = operand.aval.weak_type and new_dtype is None
    return isinstance(operand.sharding, SingleDeviceSharding) and not is_weak
