"""Layers stacked by `nnx.vmap` for `nnx.scan`: one module whose parameters have leading axes.

Each layer of a stack is taken out, treated as a layer of its own, and put back, so that a stacked
layer computes bit for bit what its layers would.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jax_dora.layers import DoRALayer, dora_class_of


def stack_shape(layer: Any) -> tuple[int, ...]:
    """Returns the leading axes that stacking gave to the parameters of a base or DoRA layer; () for
    a single layer.

    Raises:
      NotImplementedError: the axes of the stack are not the leading ones.
    """
    cls = dora_class_of(layer) or type(layer)
    shape = getattr(layer, cls.kernel_name).shape
    single = cls.unstacked_shape(layer)
    lead = len(shape) - len(single)
    if lead < 0 or tuple(shape[lead:]) != single:
        raise NotImplementedError(
            f"its {cls.kernel_name} has shape {tuple(shape)}; expected {single}, behind the axes "
            "of a stack if nnx.vmap made one: stack layers along the leading axis (out_axes=0)"
        )
    return tuple(shape[:lead])


def indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields every index into the axes of a stack, in row-major order."""
    return itertools.product(*map(range, shape))


def take(layer: Any, index: tuple[int, ...]) -> Any:
    """Returns the layer at `index` of a stack."""
    graphdef, state = nnx.split(layer)
    one = nnx.merge(graphdef, jax.tree.map(lambda array: array[index], state))
    for _, variable in nnx.iter_graph(one):
        if isinstance(variable, nnx.Param):
            _rename_axes(variable, lambda names: names[len(index) :])
    return one


def adapt_stack(
    layer: Any, shape: tuple[int, ...], adapt_one: Callable[[Any], DoRALayer]
) -> DoRALayer:
    """Returns the DoRA layer of a stack of `shape`, over the very parameters of `layer`."""
    adapted: Any
    adapted, parameters, streams = None, None, []
    for number, index in enumerate(indices(shape)):
        one = adapt_one(take(layer, index))
        state, stream, _ = nnx.split_state(nnx.state(one), nnx.LoRAParam, nnx.RngState, ...)
        if adapted is None:
            adapted, parameters = one, jax.tree.map(lambda x: room(math.prod(shape), x), state)
        # At once, and waited for, so that at most one layer of the stack is held a second time.
        parameters = jax.tree.map(lambda room, x, n=number: fill(room, x, n), parameters, state)
        jax.block_until_ready(parameters)
        if one is not adapted:
            _empty(one)
        streams.append(stream)
    if len(shape) > 1:
        parameters = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), parameters)
    nnx.update(adapted, parameters)
    nnx.update(adapted, jax.tree.map(lambda *arrays: join(arrays, shape), *streams))
    kernel = getattr(layer, adapted.kernel_name)
    names = kernel.get_metadata("out_sharding", None)
    lead = () if names is None else tuple(names)[: len(shape)]
    for _, variable in nnx.iter_graph(adapted):
        if isinstance(variable, nnx.LoRAParam):
            _rename_axes(variable, lambda names: (*lead, *names))
    for name, value in vars(layer).items():
        if isinstance(value, nnx.Variable):
            setattr(adapted, name, value)
    return adapted


def join(arrays: Any, shape: tuple[int, ...]) -> jax.Array:
    """Joins the layers' arrays, in row-major order, into one array with the stack's axes."""
    return jnp.stack(arrays).reshape(*shape, *arrays[0].shape)


def _empty(layer: Any) -> None:
    """Lets go of the parameters at once: modules lie in cycles of references, which Python collects
    when it likes."""
    for _, variable in nnx.iter_graph(layer):
        if isinstance(variable, nnx.Param):
            variable.set_value(None)


def room(count: int, one: jax.Array) -> jax.Array:
    """Returns zeros for `count` arrays like `one`, along a new leading axis, where it lies."""
    shape = (count, *one.shape)
    if isinstance(one, Tracer):
        return jnp.zeros(shape, one.dtype)
    sharding = one.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return jnp.zeros(shape, one.dtype, device=sharding)
    return jnp.zeros_like(one, shape=shape)


def fill(room: jax.Array, one: jax.Array, number: int) -> jax.Array:
    """Returns `room` with `one` at `number`, in place where both are arrays."""
    if isinstance(one, Tracer):
        return room.at[number].set(one)
    named = isinstance(room.sharding, NamedSharding)
    return _put(room.sharding if named else None)(room, one, number)


@functools.cache
def _put(sharding: NamedSharding | None) -> Callable[..., jax.Array]:
    def put(room: jax.Array, one: jax.Array, number: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(room, one, number, 0)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


def _rename_axes(variable: nnx.Variable, rename: Callable[[tuple[Any, ...]], Any]) -> None:
    names = variable.get_metadata("out_sharding", None)
    if names is not None:
        variable.set_metadata(out_sharding=rename(tuple(names)))
