"""Loading into a bank: what is sent, and the programs that change slots."""

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
from jax_dora.bank.host import RANKS, CachedG, Facts, HostAdapter, piece_shape
from jax_dora.bank.projections import BankProjection, groups
from jax_dora.layers.call import bounded_norm
from jax_dora.ops.bank_slots import Slots
from jax_dora.ops.compose import accumulator

# How many axes the arrays of a slot have, the stack's not counted, and the slots'.
SLOT_AXES = Slots(lora_a=3, lora_b=3, g=2, scale=1, rank=1)

type Arrays = dict[str, Slots]
# By path, as a load sends them.
type Piece = dict[str, tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class BaseModel:
    """The model that a bank is beside, and the kernels of its projections by path, which are read
    whenever an adapter is loaded."""

    model: nnx.Module
    kernels: Mapping[str, nnx.Variable]


@dataclasses.dataclass(frozen=True)
class Group:
    """Projections that a load sends together, by path, and the programs that it then runs: the
    norms of one group are taken while the next one's matrices travel."""

    paths: list[str]
    write: Callable[..., Arrays]
    finish: Callable[..., tuple[Arrays, dict[str, jax.Array]]]


class BankPrograms:
    """The static part of a bank: its projections, and the programs that change slots.

    One object for all banks that come of one, so that a function compiled for one takes them all.
    JAX keeps it for as long as it keeps what it compiled, so that the base, with all its weights,
    is the banks' to hold, and `base` a weak reference.
    """

    def __init__(
        self, base: BaseModel, slots: int, max_rank: int, found: Iterable[BankProjection]
    ) -> None:
        self.base = weakref.ref(base)
        self.slots = slots
        self.max_rank = max_rank
        self.projections = {projection.path: projection for projection in found}
        shardings = {path: projection.shardings() for path, projection in self.projections.items()}
        self.shardings = shardings

        # Sent once: for the projections that an adapter leaves out, and slots and ranks by number.
        self._zeros: dict[str, tuple[jax.Array, ...]] = {}
        self._numbers: dict[int, jax.Array] = {}
        self._pending_g: list[CachedG] = []

        def compiled(function: Callable[..., Any], results: Any) -> Callable[..., Any]:
            if is_explicit:
                of_result = jax.tree.map(_over_explicit_axes, results)
                function = cast(Any, jax.sharding.auto_axes(function, out_sharding=of_result))
            return _nans_allowed(jax.jit(function, donate_argnums=0, out_shardings=results))

        def group(paths: list[str]) -> Group:
            of_group = {path: shardings[path] for path in paths}
            g = {path: _without(one.g, -2) for path, one in of_group.items()}
            return Group(paths, compiled(_write, of_group), compiled(self._finish, (of_group, g)))

        meshes = [one.mesh for one in jax.tree.leaves(shardings)]
        self._is_on_mesh = bool(meshes)
        self._device = None if meshes else _device_of(base)
        is_explicit = any(AxisType.Explicit in mesh.axis_types for mesh in meshes)
        self.make = _nans_allowed(jax.jit(self._make, out_shardings=self._device or shardings))
        self.clear = compiled(_clear, shardings)
        self.groups = [group(paths) for paths in groups(self.projections.values())]

    def _make(self) -> Arrays:
        return {path: self._empty(projection) for path, projection in self.projections.items()}

    def _empty(self, projection: BankProjection) -> Slots:
        in_features, out = projection.sizes
        room = -(-self.max_rank // RANKS) * RANKS
        lead, wide = (*projection.stack.shape, self.slots), accumulator(projection.dtype)
        return Slots(
            lora_a=jnp.zeros((*lead, room, in_features), projection.dtype),
            lora_b=jnp.zeros((*lead, room, out), projection.dtype),
            g=jnp.full((*lead, out), jnp.nan, wide),
            scale=jnp.zeros(lead, wide),
            rank=jnp.zeros(lead, jnp.int32),
        )

    def load(
        self, arrays: Arrays, host: HostAdapter, kernels: Mapping[str, Any], slot: int
    ) -> Arrays:
        """Returns the arrays, which are donated, with an adapter in a slot.

        Matrices, and what norms are taken with, are sent before a program is launched, in the order
        of their use: on a GPU what comes from the host stands in one queue, and waits in it for
        programs launched before.
        """
        facts = host.facts_for(kernels)
        number = self._number(slot)
        starts = [self._number(index * RANKS) for index in range(len(host.pieces))]
        sent = [self._group_sent(group, host, facts) for group in self.groups]
        arrays, g = self.clear(arrays, number), {}
        for group, (pieces, facts) in zip(self.groups, sent, strict=True):
            part = {path: arrays[path] for path in group.paths}
            for start, piece in zip(starts, pieces, strict=True):
                part = group.write(part, piece, number, start)
            of_group = {path: kernels[path] for path in group.paths}
            part, g_of_group = group.finish(part, of_group, facts, number)
            arrays |= part
            g |= g_of_group
        self._cache_g(host.cached_g, kernels, g)
        return arrays

    def _number(self, number: int) -> Any:
        """Returns a number as programs take it: where the bank lies on one device, sent once, since
        what is sent with a call waits behind the pieces."""
        if self._is_on_mesh:
            return np.int32(number)
        if number not in self._numbers:
            self._numbers[number] = jax.device_put(np.int32(number))
        return self._numbers[number]

    def _group_sent(
        self, group: Group, host: HostAdapter, facts: Mapping[str, Facts]
    ) -> tuple[list[Piece], dict[str, Facts]]:
        """Returns a group's part of an adapter where the bank lies. Of a path a piece has lora_a
        and lora_b, or without a mesh both side by side, since every array takes its time."""
        pieces = [
            {path: self._sent(path, piece.get(path)) for path in group.paths}
            for piece in host.pieces
        ]
        of_group = {path: facts[path] for path in group.paths}
        if not self._is_on_mesh and any(one.is_dora.any() for one in of_group.values()):
            of_group = jax.device_put(of_group)
        return pieces, of_group

    def _sent(self, path: str, piece: np.ndarray | None) -> tuple[jax.Array, ...]:
        projection, sharding = self.projections[path], self.shardings[path]
        if piece is None:
            if path not in self._zeros:
                zeros = np.zeros(piece_shape(projection), projection.dtype)
                self._zeros[path] = self._sent(path, zeros)
            return self._zeros[path]
        if sharding.lora_a is None:
            return (jax.device_put(piece, self._device),)
        lora_a, lora_b = np.split(piece, [projection.sizes[0]], axis=-1)
        return (
            jax.device_put(lora_a, _without(sharding.lora_a, -3)),
            jax.device_put(lora_b, _without(sharding.lora_b, -3)),
        )

    def _cache_g(self, cached: CachedG, kernels: Any, g: Mapping[str, jax.Array]) -> None:
        """Keeps the g of an adapter that has been loaded; does not wait for it."""
        self._pending_g = [one for one in self._pending_g if not one.has_transferred()]
        if cached.beside(kernels) is None:
            cached.keep(kernels, g)
            self._pending_g.append(cached)

    def _finish(
        self, arrays: Arrays, kernels: Mapping[str, Any], facts: Mapping[str, Facts], slot: Any
    ) -> tuple[Arrays, dict[str, jax.Array]]:
        """Writes g, scales and ranks of a slot whose matrices have been written; returns g too."""

        def matrix(array: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(array, slot, array.ndim - 3, keepdims=False)

        adapters = {
            path: (matrix(old.lora_a), matrix(old.lora_b), facts[path])
            for path, old in arrays.items()
        }

        def with_norms() -> dict[str, jax.Array]:
            return {
                path: _g(self.projections[path], kernels[path], adapters[path]) for path in arrays
            }

        # One condition, since the host waits at each for a GPU.
        is_any = jnp.stack([jnp.any(one.is_dora) for one in facts.values()]).any()
        g = lax.cond(is_any, with_norms, lambda: {path: facts[path].magnitude for path in arrays})
        written = {
            path: _set(old, slot, g=g[path], scale=facts[path].scale, rank=facts[path].rank)
            for path, old in arrays.items()
        }
        return written, g


def _device_of(base: BaseModel) -> jax.sharding.SingleDeviceSharding | None:
    """Returns the device that the kernels are committed to, if that is one."""
    kernels = jax.tree.leaves([kernel.get_value() for kernel in base.kernels.values()])
    committed = [one for one in kernels if isinstance(one, jax.Array) and one.committed]
    devices = {device for one in committed for device in one.devices()}
    return jax.sharding.SingleDeviceSharding(devices.pop()) if len(devices) == 1 else None


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
    return {
        path: _set(old, slot, lora_a=0, lora_b=0, g=jnp.nan, scale=0, rank=0)
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


def _set(old: Slots, slot: Any, **values: Any) -> Slots:
    """Returns `old` with other arrays of an adapter, or one number throughout, in a slot."""

    def written(name: str, value: Any) -> jax.Array:
        array = getattr(old, name)
        axis = array.ndim - getattr(SLOT_AXES, name)
        value = jnp.asarray(value, array.dtype)
        new = jnp.expand_dims(value, axis) if value.ndim else value
        new = jnp.broadcast_to(new, (*array.shape[:axis], 1, *array.shape[axis + 1 :]))
        return lax.dynamic_update_slice_in_dim(array, new, slot, axis)

    return old._replace(**{name: written(name, value) for name, value in values.items()})


def _g(
    projection: BankProjection, kernel: Any, adapter: tuple[jax.Array, jax.Array, Facts]
) -> jax.Array:
    """Returns g, which results are multiplied by, [*stack, out]; `adapter` is lora_a, lora_b and
    facts."""

    def g_of_layer(kernel: Any, adapter: Any) -> jax.Array:
        lora_a, lora_b, facts = adapter
        g = _dora_g(projection, kernel, lora_a, lora_b, facts)
        return jnp.where(facts.is_dora, g, facts.magnitude)

    if projection.stack.axis or not isinstance(kernel, jax.Array):
        return projection.stack.map_leading(g_of_layer, kernel, adapter)
    function = g_of_layer
    for _ in projection.stack.shape:
        # All at once: one after the other, each layer's kernel would be copied first.
        function = jax.vmap(function)
    return function(kernel, adapter)


def _dora_g(
    projection: BankProjection, kernel: Any, lora_a: Any, lora_b: Any, facts: Facts
) -> jax.Array:
    layout = projection.layout(lora_a.shape[0])
    if not layout.is_one_matrix:
        kernel = layout.kernel.to_matrices(kernel)[0]
    norm = ops.factored_norm(kernel, lora_a.T, lora_b, facts.scale)
    norm = bounded_norm(norm, projection.dtype)
    return ops.magnitude_scale(facts.magnitude, norm, projection.dtype).astype(
        facts.magnitude.dtype
    )
