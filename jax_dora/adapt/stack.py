"""Layers stacked by `nnx.vmap` for `nnx.scan`: one module whose parameters have leading axes.

Each layer of a stack is taken out, treated as a layer of its own, and put back, so that a stacked
layer computes bit for bit what its layers would.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dora.adapt.kinds import Kind


def stack_shape(layer: Any, kind: Kind) -> tuple[int, ...]:
    """The leading axes that stacking gave to the parameters of `layer`; () for a single layer.

    Raises:
      NotImplementedError: the axes of the stack are not the leading ones.
    """
    shape = getattr(layer, kind.kernel).shape
    single = tuple(kind.kernel_shape(layer))
    lead = len(shape) - len(single)
    if lead < 0 or tuple(shape[lead:]) != single:
        raise NotImplementedError(
            f"its {kind.kernel} has shape {tuple(shape)}; expected {single}, behind the axes of a "
            "stack if nnx.vmap made one: stack layers along the leading axis (out_axes=0)"
        )
    return tuple(shape[:lead])


def indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every index into the axes of a stack, in row-major order."""
    return itertools.product(*map(range, shape))


def take(layer: Any, index: tuple[int, ...]) -> Any:
    """The layer at `index` of a stack."""
    graphdef, state = nnx.split(layer)
    one = nnx.merge(graphdef, jax.tree.map(lambda array: array[index], state))
    for _, variable in nnx.iter_graph(one):
        if isinstance(variable, nnx.Param):
            _rename_axes(variable, lambda names: names[len(index) :])
    return one


def adapt_stack(
    layer: Any, kind: Kind, shape: tuple[int, ...], adapt_one: Callable[[Any], Any]
) -> Any:
    """The DoRA layer of a stack of `shape`, over the very parameters of `layer`."""
    adapted, states = None, []
    for index in indices(shape):
        one = adapt_one(take(layer, index))
        # Not its kernel: at most one layer of the stack is held a second time.
        states.append(nnx.state(one, nnx.Any(nnx.LoRAParam, nnx.RngState)))
        adapted = one if adapted is None else adapted
    nnx.update(adapted, jax.tree.map(lambda *arrays: join(arrays, shape), *states))
    kernel = getattr(layer, kind.kernel)
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
    """Arrays of the layers of a stack, in row-major order, as one array with the stack's axes."""
    return jnp.stack(arrays).reshape(*shape, *arrays[0].shape)


def _rename_axes(variable: nnx.Variable, rename: Callable[[tuple[Any, ...]], Any]) -> None:
    names = variable.get_metadata("out_sharding", None)
    if names is not None:
        variable.set_metadata(out_sharding=rename(tuple(names)))
