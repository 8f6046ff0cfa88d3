"""Random arrays of tests drawn by NumPy: XLA takes 0.2 s to compile a draw, for each new shape."""

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
    """Lets NumPy draw what these functions of `jax.random` are asked for outside of a program. What
    is traced, and all other functions, JAX draws."""
    for draw in (normal, uniform, truncated_normal, randint):
        kind = int if draw is randint else float
        replaced = _replaced(getattr(jax.random, draw.__name__), draw, kind)
        # Initialisers read their draws from the module that jax.random takes its own from.
        for module in (jax.random, random):
            setattr(module, draw.__name__, replaced)


def _replaced(
    original: Callable[..., Any], draw: Callable[..., Any], kind: type
) -> Callable[..., Any]:
    order = [name for name in original.__annotations__ if name not in ("key", "return")]

    @functools.wraps(original)
    def replaced(key: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(order, args, strict=False)) | options
        dtype = jax.dtypes.canonicalize_dtype(given.pop("dtype", None) or kind)
        if not core.trace_state_clean() or jax.numpy.issubdtype(dtype, jax.numpy.complexfloating):
            return original(key, *args, **options)
        sharding = given.pop("out_sharding", None)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
        return jax.device_put(np.asarray(draw(rng, **given)).astype(dtype), _placed(sharding))

    return replaced


def _placed(sharding: Any) -> Any:
    """Returns where JAX would put what it draws: on all of the mesh, if there is one."""
    mesh = jax.sharding.get_mesh()
    if isinstance(sharding, jax.sharding.Sharding) or mesh.empty:
        return sharding
    return jax.sharding.NamedSharding(mesh, sharding or jax.P())
