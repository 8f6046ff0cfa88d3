"""Layers stacked by `nnx.vmap` for `nnx.scan`: one module whose parameters have further axes.

Each layer of a stack is taken out, treated as a layer of its own, and put back, so that a stacked
layer computes bit for bit what its layers would.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jax_dora.layers import DoRALayer, dora_class_of
from jax_dora.layers.stack import Stack, stacked_axes
from jax_dora.weights.adapter import WeightAdapter
from jax_dora.weights.registry import scan_axis

_LOG = logging.getLogger("jax_dora")


def stack_of(layer: Any, axis: int | None = None) -> Stack:
    """Returns how the parameters of a base or DoRA layer, or of an adapted weight, are stacked.

    Args:
      axis: that layers are taken to be stacked along, with a warning, where the shapes fit several
        and MaxText's metadata, `param_scan_axis`, says nothing; else they have to tell.

    Raises:
      NotImplementedError: the kernel is no stack of such layers.
      ValueError: it may be stacked along one axis or another.
    """
    if isinstance(layer, WeightAdapter):
        return layer.stack
    cls = dora_class_of(layer) or type(layer)
    kernel = getattr(layer, cls.kernel_name)
    shape, single = tuple(kernel.shape), tuple(cls.unstacked_shape(layer))
    lead = len(shape) - len(single)
    if lead != 1:
        if lead < 0 or shape[lead:] != single:
            raise _no_stack(cls, shape, single)
        return Stack(shape[:lead])
    if isinstance(layer, DoRALayer):
        return Stack((shape[layer.stack_axis],), layer.stack_axis)
    axes = stacked_axes(shape, single)
    if (bias := getattr(layer, "bias", None)) is not None:
        fits = [one for one in axes if bias.shape[min(one, bias.ndim - 1)] == shape[one]]
        axes = fits or axes
    if (said := scan_axis(kernel)) in axes:
        axes = [said]
    axis = axis if axis is None else axis % len(shape)
    if axis in axes and len(axes) > 1:
        _LOG.warning(
            "A stack of %s whose %s has shape %s, where one layer's has %s, may be stacked along "
            "axis %s; axis %d is taken, which nnx.vmap stacks along unless out_axes says otherwise",
            *(cls.__name__, cls.kernel_name, shape, single, " or ".join(map(str, axes)), axis),
        )
        axes = [axis]
    if not axes:
        raise _no_stack(cls, shape, single)
    if len(axes) > 1:
        raise ValueError(
            f"its {cls.kernel_name} has shape {shape}, where one layer's has {single}: it may be "
            f"stacked along axis {' or '.join(map(str, axes))}; expected shapes that tell, or "
            "example=, inputs to call the model with, in apply_dora; or the axis in the metadata "
            f"of the {cls.kernel_name}, as param_scan_axis"
        )
    least = len(cls.layout_of(layer, 1).magnitude.stored)
    return Stack.of_kernel(shape[axes[0]], axes[0], len(shape), least)


def _no_stack(cls: Any, shape: tuple[int, ...], single: tuple[int, ...]) -> NotImplementedError:
    return NotImplementedError(
        f"its {cls.kernel_name} has shape {shape}; expected {single}, with an axis more where "
        "nnx.vmap has stacked such layers along it, or leading axes"
    )


def take(layer: Any, stack: Stack, index: tuple[int, ...]) -> Any:
    """Returns the layer at `index` of a stack."""
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    params = jax.tree.map(lambda array: array[stack.at(index)], params)
    one = nnx.merge(graphdef, params, jax.tree.map(lambda array: array[index], rest))
    for _, variable in nnx.iter_graph(one):
        if isinstance(variable, nnx.Param):
            _rename_axes(variable, stack.without)
    return one


def adapt_stack(layer: Any, stack: Stack, adapt_one: Callable[[Any], DoRALayer]) -> DoRALayer:
    """Returns the DoRA layer of a stack, over the very parameters of `layer`."""
    adapted: Any
    adapted, parameters, streams = None, None, []
    count = math.prod(stack.shape)
    for number, index in enumerate(stack.indices()):
        one = adapt_one(take(layer, stack, index))
        state, stream, _ = nnx.split_state(nnx.state(one), nnx.LoRAParam, nnx.RngState, ...)
        if adapted is None:
            adapted, parameters = one, jax.tree.map(lambda x: room(count, x), state)
        # At once, and waited for, so that at most one layer of the stack is held a second time.
        parameters = jax.tree.map(lambda room, x, n=number: fill(room, x, n), parameters, state)
        jax.block_until_ready(parameters)
        if one is not adapted:
            _empty(one)
        streams.append(stream)
    if stack.count > 1:
        parameters = jax.tree.map(lambda x: x.reshape(*stack.shape, *x.shape[1:]), parameters)
    nnx.update(adapted, jax.tree.map(stack.from_leading, parameters))
    # The streams of dropout are numbers, which have no axis but the leading one.
    leading = Stack(stack.shape)
    nnx.update(adapted, jax.tree.map(lambda *arrays: leading.join(arrays), *streams))
    adapted.stack_axis = stack.axis
    kernel = getattr(layer, adapted.kernel_name)
    names = kernel.get_metadata("out_sharding", None)
    of_stack = () if names is None else stack.of_stack(tuple(names))
    for _, variable in nnx.iter_graph(adapted):
        if isinstance(variable, nnx.LoRAParam):
            _rename_axes(variable, functools.partial(stack.joined, of_stack))
    for name, value in vars(layer).items():
        if isinstance(value, nnx.Variable):
            setattr(adapted, name, value)
    return adapted


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
