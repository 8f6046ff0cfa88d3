"""Lets NumPy reshape, spread, transpose and convert arrays outside of compiled programs: XLA would
compile a program for each shape, which takes a twelfth of the time of the tests."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.array import ArrayImpl
from jax._src.lax import lax
from jax._src.literals import TypedNdArray

# Conversions between these round to the nearest number, as XLA's do.
_FLOATS = {np.dtype(name) for name in (jax.numpy.bfloat16, np.float16, np.float32)}


def reshape(x: np.ndarray, new_sizes: Any, dimensions: Any) -> np.ndarray | None:
    return x.reshape(new_sizes) if dimensions is None else None


def broadcast_in_dim(x: np.ndarray, shape: Any, broadcast_dimensions: Any) -> np.ndarray:
    kept = [1] * len(shape)
    for size, axis in zip(x.shape, broadcast_dimensions, strict=True):
        kept[axis] = size
    return np.broadcast_to(x.reshape(kept), shape)


def squeeze(x: np.ndarray, dimensions: Any) -> np.ndarray:
    return x.squeeze(dimensions)


def transpose(x: np.ndarray, permutation: Any) -> np.ndarray:
    return x.transpose(permutation)


def convert_element_type(x: np.ndarray, new_dtype: Any, weak_type: bool) -> np.ndarray | None:
    is_known = {x.dtype, new_dtype} <= _FLOATS or (x.dtype.kind in "bi" and new_dtype == np.float32)
    with np.errstate(all="ignore"):
        return x.astype(new_dtype) if is_known and not weak_type else None


MOVES = reshape, broadcast_in_dim, squeeze, transpose, convert_element_type


def primitive_of(move: Callable[..., Any]) -> Any:
    return getattr(lax, f"{move.__name__}_p")


def move_with_numpy() -> None:
    """Replaces what JAX does to evaluate these operations for arrays on one device."""
    for move in MOVES:
        primitive = primitive_of(move)
        primitive.def_impl(_replacement(primitive.impl, move))


def _replacement(original: Callable[..., Any], move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(x: Any, *others: Any, sharding: Any = None, **parameters: Any) -> Any:
        found = None
        if sharding is None and not others and _is_plain(x, move is convert_element_type):
            found = move(np.asarray(x), **parameters)
        if found is None:
            given = {} if move in (squeeze, transpose) else {"sharding": sharding}
            return original(x, *others, **parameters, **given)
        # Of its own memory: JAX may use an array's without copying it, and change it in a donation.
        place = x.sharding if isinstance(x, ArrayImpl) and x.committed else None
        return jax.device_put(np.array(found), place)

    return replacement


def _is_plain(x: Any, may_be_weak: bool) -> bool:
    if type(x) not in (ArrayImpl, TypedNdArray) or (x.weak_type and not may_be_weak):
        return False
    if isinstance(x, ArrayImpl) and not (
        isinstance(x.sharding, jax.sharding.SingleDeviceSharding)
        and (x.committed or x.devices() == {jax.devices()[0]})
    ):
        return False
    return (
        (x.dtype in _FLOATS or x.dtype in (np.int32, np.bool_))
        and jax.sharding.get_mesh().empty
        and jax.sharding.get_abstract_mesh().empty
        and jax.config.jax_default_device is None
        and not jax.config.jax_debug_nans
    )
