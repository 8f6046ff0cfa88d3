"""Notices that a base model has changed, which an adapter does not store.

The base model's kernels are `nnx.Param`s too, so an optimizer with `wrt=nnx.Param` trains them.
When a model gets its adapter, a corner of each parameter is kept on the host, and compared when the
adapter is taken out. A step of an optimizer changes nearly every number of a parameter.
"""

import collections
import logging
from collections.abc import Collection, Mapping
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer

_LOG = logging.getLogger(__name__)
_CORNER = 8  # indices along each axis
_MOST_LISTED = 5
# If that many base models have the same shapes, the one of a given model is not known.
_MOST_BASES = 32

type _Corners = dict[str, np.ndarray]

# By paths, shapes and dtypes of a model, since models are split, merged and copied in training.
_bases: dict[Any, collections.deque[_Corners]] = {}


def remember(model: nnx.Module) -> None:
    """Records the values of the base model of `model`, unless they are traced or abstract."""
    key, corners = _corners(model)
    known = _bases.setdefault(key, collections.deque(maxlen=_MOST_BASES))
    if corners and all(_changed(corners, other) for other in known):
        known.append(corners)


def warn_of_changed(model: nnx.Module, done: str, stored: Collection[str] = ()) -> None:
    """Logs a warning that begins with `done`, the name of a function, and lists the parameters of
    the base model that have changed since they were recorded, except the paths in `stored`."""
    key, corners = _corners(model)
    known = _bases.get(key, ())
    if not known or len(known) == _MOST_BASES:
        return
    changed = min((_changed(corners, other) for other in known), key=len)
    if lost := [path for path in changed if path not in stored]:
        more = len(lost) - _MOST_LISTED
        _LOG.warning(
            "%s leaves out the base model, %d of whose parameters have changed since the model got "
            "its adapter: %s%s. An optimizer with wrt=nnx.Param trains them too. Use "
            "wrt=nnx.LoRAParam to train the adapter alone; or keep what they have learned, by "
            "modules_to_save and bias of jax_dora.peft.save_adapter, or in the whole model, as "
            "jax_dora.merge_dora returns it. If they were loaded after the adapter was made, "
            "nothing is lost; if magnitudes were not loaded too, jax_dora.reset_magnitudes(model) "
            "sets them for this base",
            done,
            len(lost),
            ", ".join(lost[:_MOST_LISTED]),
            f" and {more} more" if more > 0 else "",
        )


def _corners(model: nnx.Module) -> tuple[Any, _Corners]:
    """Returns a key for the shapes of the base model, and a corner of each of its parameters whose
    values this process has, by path."""
    state = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    arrays = {
        "/".join(map(str, path)): variable.get_raw_value()
        for path, variable in nnx.to_flat_state(state)
    }
    floats = {
        path: array
        for path, array in arrays.items()
        if hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.floating)
    }
    key = tuple((path, array.shape, array.dtype) for path, array in floats.items())
    floats = {path: array for path, array in floats.items() if _has_values(array)}
    if not floats:
        return key, {}
    # The caller's mesh, or its trace, would apply to slices of the shards in its own thread.
    with futures.ThreadPoolExecutor(1) as thread:
        return key, thread.submit(_read, floats).result()


def _read(arrays: Mapping[str, Any]) -> _Corners:
    found = {path: one for path, array in arrays.items() if (one := _corner(array)) is not None}
    # A copy, since what is got from the CPU can be the array's own memory.
    return {path: np.array(one) for path, one in jax.device_get(found).items()}


def _has_values(array: Any) -> bool:
    if isinstance(array, Tracer) or not isinstance(array, (jax.Array, np.ndarray)):
        return False
    return isinstance(array, np.ndarray) or not array.is_deleted()


def _corner(array: jax.Array | np.ndarray) -> Any:
    if isinstance(array, np.ndarray):
        return array[(slice(_CORNER),) * array.ndim]
    firsts = (one.data for one in array.addressable_shards if not any(i.start for i in one.index))
    first = next(firsts, None)
    return None if first is None else _sliced(first)


@jax.jit
def _sliced(array: jax.Array) -> jax.Array:
    """Returns the corner of an array. An index expression would take several times as long."""
    return lax.slice(array, (0,) * array.ndim, [min(size, _CORNER) for size in array.shape])


def _changed(corners: _Corners, other: _Corners) -> list[str]:
    """Returns the paths at which two bases differ. Corners are smaller in a small shard."""

    def is_changed(one: np.ndarray, two: np.ndarray) -> bool:
        common = tuple(map(slice, map(min, one.shape, two.shape)))
        return one[common].tobytes() != two[common].tobytes()

    return [path for path in corners if path in other and is_changed(corners[path], other[path])]
