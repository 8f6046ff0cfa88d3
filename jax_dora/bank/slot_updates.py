"""The functions of arrays by which a bank's programs change a slot."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dora import ops
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.bank.host import Scaling
from jax_dora.layers.magnitude import bounded_norm
from jax_dora.ops.bank_slots import Slots

# The number of axes of each array without the stack's axes: the slot axis and the axes behind it.
SLOT_AXES = Slots(lora_a=3, lora_b=3, g=2, scale=1, rank=1)

type Arrays = dict[str, Slots]
# The device arrays of one of `HostAdapter.rank_blocks`, by path.
type RankBlock = dict[str, tuple[jax.Array, ...]]


def clear(arrays: Arrays, slot: Any) -> Arrays:
    """Empties a slot: sets its g to NaN, and everything else to zero."""
    return {
        path: _set(old, slot, lora_a=0, lora_b=0, g=jnp.nan, scale=0, rank=0)
        for path, old in arrays.items()
    }


def write(arrays: Arrays, block: RankBlock, slot: Any, start: Any) -> Arrays:
    """Writes a block of lora_a and lora_b into a slot, from rank `start` on."""

    def update(old: jax.Array, new: jax.Array) -> jax.Array:
        position = [np.int32(0)] * old.ndim
        position[-3:-1] = [slot, start]
        return lax.dynamic_update_slice(old, jnp.expand_dims(new, -3), position)

    def update_both(old: Slots, new: tuple[jax.Array, ...]) -> Slots:
        if len(new) == 1:
            new = tuple(jnp.split(new[0], [old.lora_a.shape[-1]], axis=-1))
        return old._replace(lora_a=update(old.lora_a, new[0]), lora_b=update(old.lora_b, new[1]))

    return {path: update_both(old, block[path]) for path, old in arrays.items()}


def _set(old: Slots, slot: Any, **values: Any) -> Slots:
    """Returns `old` with new values in a slot: arrays, or numbers to fill the slot's part with."""

    def update(name: str, value: Any) -> jax.Array:
        array = getattr(old, name)
        axis = array.ndim - getattr(SLOT_AXES, name)
        value = jnp.asarray(value, array.dtype)
        new = jnp.expand_dims(value, axis) if value.ndim else value
        new = jnp.broadcast_to(new, (*array.shape[:axis], 1, *array.shape[axis + 1 :]))
        return lax.dynamic_update_slice_in_dim(array, new, slot, axis)

    return old._replace(**{name: update(name, value) for name, value in values.items()})


def with_scalings(
    arrays: Arrays, scalings: Mapping[str, Scaling], g: Mapping[str, jax.Array], slot: Any
) -> Arrays:
    """Returns the arrays with g, scale and rank in a slot."""
    return {
        path: _set(arrays[path], slot, g=g[path], scale=scaling.scale, rank=scaling.rank)
        for path, scaling in scalings.items()
    }


def g_of(
    projection: AdaptableWeight, kernel: Any, adapter: tuple[jax.Array, jax.Array, Scaling]
) -> jax.Array:
    """Returns g [*stack, out] of an adapter: lora_a, lora_b and its scaling."""

    def g_of_layer(kernel: Any, adapter: Any) -> jax.Array:
        lora_a, lora_b, scaling = adapter
        contraction = projection.contraction(lora_a.shape[0])
        if not contraction.is_one_matrix:
            kernel = contraction.kernel.to_matrices(kernel)[0]
        norm = ops.factored_norm(kernel, lora_a.T, lora_b, scaling.scale)
        norm = bounded_norm(norm, projection.result_dtype)
        g = ops.magnitude_scale(scaling.numerator, norm, projection.result_dtype)
        # If the norm's squares overflow, as in diverged adapters, no result must be finite. NaN is
        # the g of empty slots.
        most = jnp.finfo(norm.dtype).max
        g = jnp.where((norm == most) & (scaling.numerator != most), jnp.inf, g)
        return jnp.where(scaling.is_dora, g.astype(scaling.numerator.dtype), scaling.numerator)

    if not projection.stack.is_leading or not isinstance(kernel, jax.Array):
        return projection.stack.map_leading(g_of_layer, kernel, adapter)
    function = g_of_layer
    for _ in projection.stack.shape:
        # Computes all layers at once: a loop would first copy each layer's kernel.
        function = jax.vmap(function)
    return function(kernel, adapter)
