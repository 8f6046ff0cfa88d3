"""What of a bank is no array: its projections, and the programs that change its slots."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType

from jax_dora import ops
from jax_dora.bank.host import RANKS, Facts
from jax_dora.bank.places import Place
from jax_dora.layers.call import bounded_norm
from jax_dora.ops.bank_slots import Slots
from jax_dora.ops.compose import accumulator

type Arrays = dict[str, Slots]


class Plan:
    """What of a bank is no array: the model, its projections, the programs that change slots.

    One object for all banks that come of one, so that a function compiled for one takes them all.
    """

    def __init__(self, model: nnx.Module, slots: int, max_rank: int, found: list[Place]) -> None:
        self.model = model
        self.slots = slots
        self.max_rank = max_rank
        self.places = {place.path: place for place in found}
        shardings = {path: place.shardings() for path, place in self.places.items()}
        self.shardings = shardings

        def compiled(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
            if is_explicit:
                function = cast(Any, jax.sharding.auto_axes(function, out_sharding=shardings))
            return jax.jit(function, donate_argnums=0, out_shardings=shardings)

        meshes = (one.mesh for one in jax.tree.leaves(shardings))
        is_explicit = any(AxisType.Explicit in mesh.axis_types for mesh in meshes)
        self.make = jax.jit(self._make, out_shardings=shardings)
        self.clear = compiled(_clear)
        self.write = compiled(_write)
        self.finish = compiled(self._finish)

    def _make(self) -> Arrays:
        return {path: self._empty(place) for path, place in self.places.items()}

    def _empty(self, place: Place) -> Slots:
        in_features, out = place.sizes
        room = -(-self.max_rank // RANKS) * RANKS
        lead, wide = (*place.stack.shape, self.slots), accumulator(place.dtype)
        return Slots(
            lora_a=jnp.zeros((*lead, room, in_features), place.dtype),
            lora_b=jnp.zeros((*lead, room, out), place.dtype),
            g=jnp.full((*lead, out), jnp.nan, wide),
            scale=jnp.zeros(lead, wide),
            rank=jnp.zeros(lead, jnp.int32),
        )

    def kernels(self) -> dict[str, Any]:
        """Returns the model's kernels as they are now."""
        return {path: place.kernel.get_value() for path, place in self.places.items()}

    def on_device(self, path: str, piece: Any) -> tuple[jax.Array, jax.Array]:
        """Returns a piece of a path's adapter where the bank lies; zeros for None."""
        place, sharding = self.places[path], self.shardings[path]
        if piece is None:
            shape = (*place.stack.shape, RANKS)
            piece = tuple(np.zeros((*shape, n), place.dtype) for n in place.sizes)
        lora_a, lora_b = piece
        return _put(lora_a, sharding.lora_a), _put(lora_b, sharding.lora_b)

    def _finish(
        self, arrays: Arrays, kernels: Mapping[str, Any], facts: Mapping[str, Facts], slot: Any
    ) -> Arrays:
        """Writes g, scales and ranks of a slot whose matrices have been written."""
        return {
            path: _finished(self.places[path], arrays[path], kernels[path], facts[path], slot)
            for path in arrays
        }


def _put(array: np.ndarray, sharding: Any) -> jax.Array:
    """Returns a piece [*stack, ranks, features] where an array [*stack, slots, rank, features] of
    this sharding lies."""
    if sharding is None:
        return jax.device_put(array)
    spec = list(sharding.spec)
    del spec[-3]
    return jax.device_put(array, jax.NamedSharding(sharding.mesh, jax.P(*spec)))


def _clear(arrays: Arrays, slot: Any) -> Arrays:
    """Empties a slot: zeros, and NaN for what its results are multiplied by."""
    return {
        path: Slots(
            lora_a=_set(old.lora_a, 0, slot, 3),
            lora_b=_set(old.lora_b, 0, slot, 3),
            g=_set(old.g, jnp.nan, slot, 2),
            scale=_set(old.scale, 0, slot, 1),
            rank=_set(old.rank, 0, slot, 1),
        )
        for path, old in arrays.items()
    }


def _write(
    arrays: Arrays, piece: Mapping[str, tuple[jax.Array, jax.Array]], slot: Any, start: Any
) -> Arrays:
    """Writes the ranks of a slot from `start` on."""

    def written(old: jax.Array, new: jax.Array) -> jax.Array:
        first = [0] * old.ndim
        first[-3:-1] = [slot, start]
        return lax.dynamic_update_slice(old, jnp.expand_dims(new, -3), first)

    return {
        path: old._replace(
            lora_a=written(old.lora_a, piece[path][0]), lora_b=written(old.lora_b, piece[path][1])
        )
        for path, old in arrays.items()
    }


def _set(old: jax.Array, value: Any, slot: Any, trailing: int) -> jax.Array:
    """Returns `old` with `value` in a slot, the axis of which is followed by `trailing` - 1."""
    axis = old.ndim - trailing
    shape = (*old.shape[:axis], 1, *old.shape[axis + 1 :])
    new = jnp.broadcast_to(jnp.asarray(value, old.dtype), shape)
    return lax.dynamic_update_slice_in_dim(old, new, slot, axis)


def _finished(place: Place, old: Slots, kernel: Any, facts: Facts, slot: Any) -> Slots:
    lora_a, lora_b = (
        lax.dynamic_index_in_dim(one, slot, one.ndim - 3, keepdims=False)
        for one in (old.lora_a, old.lora_b)
    )

    def g_of_layer(kernel: Any, of_adapter: Any) -> jax.Array:
        lora_a, lora_b, facts = of_adapter
        return lax.cond(
            facts.is_dora,
            lambda: _dora_g(place, kernel, lora_a, lora_b, facts),
            lambda: jnp.ones_like(facts.magnitude),
        )

    g = place.stack.map_leading(g_of_layer, kernel, (lora_a, lora_b, facts))

    def written(array: jax.Array, new: jax.Array) -> jax.Array:
        axis = place.stack.count
        new = jnp.expand_dims(new.astype(array.dtype), axis)
        return lax.dynamic_update_slice_in_dim(array, new, slot, axis)

    return old._replace(
        g=written(old.g, g),
        scale=written(old.scale, facts.scale),
        rank=written(old.rank, facts.rank),
    )


def _dora_g(place: Place, kernel: Any, lora_a: Any, lora_b: Any, facts: Facts) -> jax.Array:
    layout = place.layout(lora_a.shape[0])
    if not layout.is_one_matrix:
        kernel = layout.kernel.to_matrices(kernel)[0]
    norm = ops.factored_norm(kernel, lora_a.T, lora_b, facts.scale)
    norm = bounded_norm(norm, place.dtype)
    return ops.magnitude_scale(facts.magnitude, norm, place.dtype).astype(facts.magnitude.dtype)
