"""What of a bank is no array: its projections, and the programs that change its slots."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType

from jax_dora import ops
from jax_dora.bank.host import RANKS, Facts, HostAdapter, Settled, piece_shape
from jax_dora.bank.places import Place
from jax_dora.layers.call import bounded_norm
from jax_dora.ops.bank_slots import Slots
from jax_dora.ops.compose import accumulator

type Arrays = dict[str, Slots]
# By path, as `Plan.on_device` sends them.
type Piece = dict[str, tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Base:
    """The model that a bank is beside, and the kernels of its projections by path, which are read
    whenever an adapter is loaded."""

    model: nnx.Module
    kernels: Mapping[str, nnx.Variable]


class Plan:
    """What of a bank is no array: its projections, and the programs that change slots.

    One object for all banks that come of one, so that a function compiled for one takes them all.
    JAX keeps it for as long as it keeps what it compiled, so that the base, with all its weights,
    is the banks' to hold, and `base` a weak reference.
    """

    def __init__(self, base: Base, slots: int, max_rank: int, found: Iterable[Place]) -> None:
        self.base = weakref.ref(base)
        self.slots = slots
        self.max_rank = max_rank
        self.places = {place.path: place for place in found}
        shardings = {path: place.shardings() for path, place in self.places.items()}
        self.shardings = shardings

        # For the projections that an adapter leaves out; they are sent once.
        self._zeros: dict[str, tuple[jax.Array, ...]] = {}
        self._arriving: list[Settled] = []

        def compiled(function: Callable[..., Any], results: Any = shardings) -> Callable[..., Any]:
            if is_explicit:
                of_result = jax.tree.map(_over_explicit_axes, results)
                function = cast(Any, jax.sharding.auto_axes(function, out_sharding=of_result))
            return _nans_allowed(jax.jit(function, donate_argnums=0, out_shardings=results))

        meshes = (one.mesh for one in jax.tree.leaves(shardings))
        is_explicit = any(AxisType.Explicit in mesh.axis_types for mesh in meshes)
        self.make = _nans_allowed(jax.jit(self._make, out_shardings=shardings))
        self.clear = compiled(_clear)
        self.write = compiled(_write)
        g = {path: _without(one.g, -2) for path, one in shardings.items()}
        self.finish = compiled(self._finish, (shardings, g))

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

    def on_device(self, host: HostAdapter) -> list[Piece]:
        """Returns an adapter's pieces where the bank lies. Of a path there are lora_a and lora_b,
        or without a mesh both side by side, since every array takes its time."""
        return [
            {path: self._sent(path, piece.get(path)) for path in self.places}
            for piece in host.pieces
        ]

    def _sent(self, path: str, piece: np.ndarray | None) -> tuple[jax.Array, ...]:
        place, sharding = self.places[path], self.shardings[path]
        if piece is None:
            if path not in self._zeros:
                zeros = np.zeros(piece_shape(place), place.dtype)
                self._zeros[path] = self._sent(path, zeros)
            return self._zeros[path]
        if sharding.lora_a is None:
            return (jax.device_put(piece),)
        lora_a, lora_b = np.split(piece, [place.sizes[0]], axis=-1)
        return (
            jax.device_put(lora_a, _without(sharding.lora_a, -3)),
            jax.device_put(lora_b, _without(sharding.lora_b, -3)),
        )

    def settle(self, settled: Settled, kernels: Any, g: Mapping[str, jax.Array]) -> None:
        """Keeps the g of an adapter that has been loaded; does not wait for it."""
        self._arriving = [one for one in self._arriving if not one.has_arrived()]
        if settled.beside(kernels) is None:
            settled.settle(kernels, g)
            self._arriving.append(settled)

    def _finish(
        self, arrays: Arrays, kernels: Mapping[str, Any], facts: Mapping[str, Facts], slot: Any
    ) -> tuple[Arrays, dict[str, jax.Array]]:
        """Writes g, scales and ranks of a slot whose matrices have been written; returns g too."""
        found = {
            path: _finished(self.places[path], arrays[path], kernels[path], facts[path], slot)
            for path in arrays
        }
        slots = {path: one for path, (one, _) in found.items()}
        return slots, {path: g for path, (_, g) in found.items()}


def _nans_allowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose results may be NaN, as those of empty slots are, under
    `jax.debug_nans` too."""

    def called(*arguments: Any) -> Any:
        with jax.debug_nans(False):
            return function(*arguments)

    return called


def _over_explicit_axes(sharding: jax.NamedSharding) -> jax.NamedSharding:
    """Returns the sharding without axes of the mesh that are not explicit."""
    mesh = sharding.mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def explicit(names: Any) -> Any:
        given = names if isinstance(names, tuple) else (names,)
        return tuple(name for name in given if types.get(name) is AxisType.Explicit) or None

    return jax.NamedSharding(mesh, jax.P(*map(explicit, sharding.spec)))


def _without(sharding: Any, axis: int) -> Any:
    """Returns the sharding of an array that lacks an axis."""
    if sharding is None:
        return None
    spec = list(sharding.spec)
    del spec[axis]
    return jax.NamedSharding(sharding.mesh, jax.P(*spec))


def _clear(arrays: Arrays, slot: Any) -> Arrays:
    """Empties a slot: zeros, and NaN for what its results are multiplied by."""
    empty = Slots(lora_a=(0, 3), lora_b=(0, 3), g=(jnp.nan, 2), scale=(0, 1), rank=(0, 1))
    return {
        path: Slots(
            *(_set(one, value, slot, axes) for one, (value, axes) in zip(old, empty, strict=True))
        )
        for path, old in arrays.items()
    }


def _write(arrays: Arrays, piece: Piece, slot: Any, start: Any) -> Arrays:
    """Writes the ranks of a slot from `start` on."""

    def written(old: jax.Array, new: jax.Array) -> jax.Array:
        first = [np.int32(0)] * old.ndim
        first[-3:-1] = [slot, start]
        return lax.dynamic_update_slice(old, jnp.expand_dims(new, -3), first)

    def both(old: Slots, new: tuple[jax.Array, ...]) -> Slots:
        if len(new) == 1:
            new = tuple(jnp.split(new[0], [old.lora_a.shape[-1]], axis=-1))
        return old._replace(lora_a=written(old.lora_a, new[0]), lora_b=written(old.lora_b, new[1]))

    return {path: both(old, piece[path]) for path, old in arrays.items()}


def _set(old: jax.Array, value: Any, slot: Any, trailing: int) -> jax.Array:
    """Returns `old` with `value` in a slot, the axis of which is followed by `trailing` - 1."""
    axis = old.ndim - trailing
    shape = (*old.shape[:axis], 1, *old.shape[axis + 1 :])
    new = jnp.broadcast_to(jnp.asarray(value, old.dtype), shape)
    return lax.dynamic_update_slice_in_dim(old, new, slot, axis)


def _finished(
    place: Place, old: Slots, kernel: Any, facts: Facts, slot: Any
) -> tuple[Slots, jax.Array]:
    lora_a, lora_b = (
        lax.dynamic_index_in_dim(one, slot, one.ndim - 3, keepdims=False)
        for one in (old.lora_a, old.lora_b)
    )

    def g_of_layer(kernel: Any, of_adapter: Any) -> jax.Array:
        lora_a, lora_b, facts = of_adapter
        g = _dora_g(place, kernel, lora_a, lora_b, facts)
        return jnp.where(facts.is_dora, g, facts.magnitude)

    def with_norms() -> jax.Array:
        of_adapter = lora_a, lora_b, facts
        if place.stack.axis or not isinstance(kernel, jax.Array):
            return place.stack.map_leading(g_of_layer, kernel, of_adapter)
        function = g_of_layer
        for _ in place.stack.shape:
            # All at once: one after the other, each layer's kernel would be copied first.
            function = jax.vmap(function)
        return function(kernel, of_adapter)

    g = lax.cond(jnp.any(facts.is_dora), with_norms, lambda: facts.magnitude)

    new = (jnp.expand_dims(one, place.stack.count) for one in (g, facts.scale, facts.rank))
    found = (
        _set(array, one, slot, axes)
        for array, one, axes in zip(old[2:], new, (2, 1, 1), strict=True)
    )
    return Slots(old.lora_a, old.lora_b, *found), g


def _dora_g(place: Place, kernel: Any, lora_a: Any, lora_b: Any, facts: Facts) -> jax.Array:
    layout = place.layout(lora_a.shape[0])
    if not layout.is_one_matrix:
        kernel = layout.kernel.to_matrices(kernel)[0]
    norm = ops.factored_norm(kernel, lora_a.T, lora_b, facts.scale)
    norm = bounded_norm(norm, place.dtype)
    return ops.magnitude_scale(facts.magnitude, norm, place.dtype).astype(facts.magnitude.dtype)
