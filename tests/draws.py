"""Lets NumPy draw the random arrays of tests: XLA needs 0.2 s to compile a draw of a new shape."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import core, random


def normal(rng: np.random.Generator, shape: Any = ()) -> np.ndarray:
    return rng.normal(size=shape)


def uniform(
    rng: np.random.Generator, shape: Any = (), minval: float = 0.0, maxval: float = 1.0
) -> np.ndarray:
    return rng.uniform(minval, maxval, shape)


def truncated_normal(
    rng: np.random.Generator, lower: float, upper: float, shape: Any = ()
) -> np.ndarray:
    values = np.asarray(rng.normal(size=shape))
    while (outside := (values < lower) | (values > upper)).any():
        values[outside] = rng.normal(size=outside.sum())
    return values


def randint(rng: np.random.Generator, shape: Any, minval: int, maxval: int) -> np.ndarray:
    return rng.integers(minval, maxval, shape)


def draw_with_numpy() -> None:
    """Replaces these functions of `jax.random` by NumPy's for calls outside of traced programs."""
    for draw in (normal, uniform, truncated_normal, randint):
        default_dtype = int if draw is randint else float
        replacement = _replacement(getattr(jax.random, draw.__name__), draw, default_dtype)
        # Initialisers call the functions of the private module that jax.random imports from.
        for module in (jax.random, random):
            setattr(module, draw.__name__, replacement)


def _replacement(
    original: Callable[..., Any], draw: Callable[..., Any], default_dtype: type
) -> Callable[..., Any]:
    parameters = [name for name in original.__annotations__ if name not in ("key", "return")]

    @functools.wraps(original)
    def replacement(key: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | options
        dtype = jax.dtypes.canonicalize_dtype(given.pop("dtype", None) or default_dtype)
        if not core.trace_state_clean() or jax.numpy.issubdtype(dtype, jax.numpy.complexfloating):
            return original(key, *args, **options)
        sharding = given.pop("out_sharding", None)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
        values = np.asarray(draw(rng, **given)).astype(dtype)
        if draw is uniform:
            # Rounding to `dtype` must not reach maxval: initialisers take erf_inv of the values.
            low = np.asarray(given.get("minval", 0.0), dtype)
            high = np.asarray(given.get("maxval", 1.0), dtype)
            values = np.minimum(values, np.nextafter(high, low))
        return jax.device_put(values, _sharding(sharding))

    return replacement


def _sharding(sharding: Any) -> Any:
    """Returns the sharding that JAX would give to a drawn array: over the mesh, if one is set."""
    mesh = jax.sharding.get_mesh()
    if isinstance(sharding, jax.sharding.Sharding) or mesh.empty:
        return sharding
    return jax.sharding.NamedSharding(mesh, sharding or jax.P())
