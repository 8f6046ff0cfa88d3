"""Transfers adapters to the device, and compiles the programs that change a bank's slots."""

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh

from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.bank.host import CachedG, HostAdapter, Scaling, block_shape
from jax_dora.bank.projections import groups, shardings_of
from jax_dora.bank.slot_updates import Arrays, RankBlock, clear, g_of, with_scalings, write
from jax_dora.ops.bank_slots import RANKS, Slots
from jax_dora.ops.dtypes import accumulation_dtype


@dataclasses.dataclass(frozen=True, eq=False)
class BaseModel:
    """The base model of a bank, and the kernels of its projections by path, which every load
    reads."""

    model: nnx.Module
    kernels: Mapping[str, nnx.Variable]


class Group(NamedTuple):
    """Projections whose adapters are transferred together, and the programs for them: `write` a
    block of ranks of lora_a and lora_b into a slot; `finish` it, and return g as well, which is
    computed from kernels and magnitudes while the next group is transferred, unless it is known."""

    paths: list[str]
    write: Callable[..., Arrays]
    finish: Callable[..., tuple[Arrays, dict[str, jax.Array]]]


class BankPrograms:
    """The static part of a bank: its projections, and the programs that change slots.

    All banks that are derived from one bank share this object, so that a function compiled for one
    of them accepts all. JAX keeps it alive as long as its compilation cache. Therefore `base` is a
    weak reference, and only the banks keep the base model with its weights alive.
    """

    def __init__(
        self, base: BaseModel, slots: int, max_rank: int, projections: Iterable[AdaptableWeight]
    ) -> None:
        self.base = weakref.ref(base)
        self.slots = slots
        self.max_rank = max_rank
        self._held_rank = -(-max_rank // RANKS) * RANKS
        self.projections = {projection.path: projection for projection in projections}
        shardings = {path: shardings_of(one) for path, one in self.projections.items()}
        self.shardings = shardings

        # Device arrays that are transferred once: blocks of zeros for projections that an adapter
        # leaves out, and the numbers of slots and ranks.
        self._zeros: dict[str, tuple[jax.Array, ...]] = {}
        self._numbers: dict[int, jax.Array] = {}
        self._pending_g: list[CachedG] = []
        self._has_loaded = False

        def jit(function: Callable[..., Any], out_shardings: Any) -> Callable[..., Any]:
            if is_explicit:
                out_sharding = jax.tree.map(_over_explicit_axes, out_shardings)
                function = cast(Any, jax.sharding.auto_axes(function, out_sharding=out_sharding))
            jitted = jax.jit(function, donate_argnums=0, out_shardings=out_shardings)
            return self._in_any_context(jitted)

        def make_group(paths: list[str]) -> Group:
            arrays = {path: shardings[path] for path in paths}
            g = {path: _without_axis(slots.g, -2) for path, slots in arrays.items()}
            return Group(paths, jit(write, arrays), jit(self._finish, (arrays, g)))

        meshes = [sharding.mesh for sharding in jax.tree.leaves(shardings)]
        self._is_on_mesh = bool(meshes)
        self._device = None if meshes else _device_of(base)
        is_explicit = any(AxisType.Explicit in mesh.axis_types for mesh in meshes)
        on_meshes = {device for mesh in meshes for device in mesh.devices.flat}
        # Those that the bank's arrays are committed to.
        self._devices = self._device.device_set if self._device else on_meshes
        make = jax.jit(self._make, out_shardings=self._device or shardings)
        self.make = self._in_any_context(make)
        self.clear = jit(clear, shardings)
        self.groups = [make_group(paths) for paths in groups(self.projections.values())]

    def _in_any_context(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function for which two settings of its caller are off: `jax.debug_nans`, since
        empty slots contain NaN, and `jax.set_mesh`, unless the bank is on a mesh."""

        def wrapper(*arguments: Any) -> Any:
            with contextlib.ExitStack() as stack:
                stack.enter_context(jax.debug_nans(False))
                if not (self._is_on_mesh or jax.sharding.get_abstract_mesh().empty):
                    stack.enter_context(jax.set_mesh(Mesh(np.empty((), object), ())))
                return function(*arguments)

        return wrapper

    def check_kernels(self, kernels: Mapping[str, Any]) -> None:
        """Raises ValueError if a kernel would fail the programs once the bank is donated."""
        for path, kernel in kernels.items():
            if misfit := _misfit(kernel, self.projections[path].shape, self._devices):
                raise ValueError(
                    f"the model's kernel at {path!r} {misfit}, as when the bank was made: assign "
                    "one to the model (nnx.update), or make a new AdapterBank"
                )

    def _make(self) -> Arrays:
        return {path: self._empty(projection) for path, projection in self.projections.items()}

    def _empty(self, projection: AdaptableWeight) -> Slots:
        (in_features, out), dtype = projection.sizes, projection.result_dtype
        lead, wide = (*projection.stack.shape, self.slots), accumulation_dtype(dtype)
        return Slots(
            lora_a=jnp.zeros((*lead, self._held_rank, in_features), dtype),
            lora_b=jnp.zeros((*lead, self._held_rank, out), dtype),
            g=jnp.full((*lead, out), jnp.nan, wide),
            scale=jnp.zeros(lead, wide),
            rank=jnp.zeros(lead, jnp.int32),
        )

    def load(
        self, arrays: Arrays, host: HostAdapter, kernels: Mapping[str, Any], slot: int
    ) -> Arrays:
        """Returns the arrays, which are donated, with an adapter in a slot.

        All transfers are started before any program is launched, in the order of their use: a GPU
        has one queue for transfers, where each waits for the programs launched before it. The host
        knows whether g is known or has to be computed; one program for both would wait for a
        condition. The first load launches both, so that later loads compile nothing.
        """
        scalings = host.scalings_for(kernels)
        is_dora = any(scaling.is_dora.any() for scaling in scalings.values())
        number = self.number(slot)
        # The first block is last, so that every path's ranks are the last ones of the slot.
        starts = [
            self.number(self._held_rank - (index + 1) * RANKS)
            for index in range(len(host.rank_blocks))
        ]
        transfers = [self._transfer_group(group, host, scalings) for group in self.groups]
        arrays, g = self.clear(arrays, number), {}
        for group, (blocks, packed) in zip(self.groups, transfers, strict=True):
            part, group_g = {path: arrays[path] for path in group.paths}, {}
            for start, block in zip(starts, blocks, strict=True):
                part = group.write(part, block, number, start)
            if not (is_dora and self._has_loaded):
                part, group_g = group.finish(part, packed, number)
            if is_dora or not self._has_loaded:
                group_kernels = {path: kernels[path] for path in group.paths}
                part, group_g = group.finish(part, packed, number, group_kernels)
            arrays |= part
            g |= group_g
        self._has_loaded = True
        self._cache_g(host.cached_g, kernels, g)
        return arrays

    def number(self, number: int) -> Any:
        """Returns a number as an argument for programs; on one device it is transferred once and
        kept, since a later transfer waits for the blocks."""
        if self._is_on_mesh:
            return np.int32(number)
        if number not in self._numbers:
            self._numbers[number] = jax.device_put(np.int32(number))
        return self._numbers[number]

    def _transfer_group(
        self, group: Group, host: HostAdapter, scalings: Mapping[str, Scaling]
    ) -> tuple[list[RankBlock], Any]:
        """Transfers a group's part of an adapter to the bank's devices: ranks and scalings.

        On a mesh, a block has lora_a and lora_b at each path. On one device it has both as one
        array, since each array takes extra time (about 0.1 ms on an H100). For the same reason the
        scalings of all paths are one vector.
        """
        blocks = [
            {path: self._transfer(path, block.get(path)) for path in group.paths}
            for block in host.rank_blocks
        ]
        ordered = [scalings[path] for path in sorted(group.paths)]
        packed = np.concatenate(
            [np.ravel(array) for scaling in ordered for array in scaling],
            dtype=np.result_type(*(scaling.numerator for scaling in ordered)),
            casting="unsafe",
        )
        # On a mesh the program sends it to all devices.
        return blocks, packed if self._is_on_mesh else jax.device_put(packed, self._device)

    def _transfer(self, path: str, block: np.ndarray | None) -> tuple[jax.Array, ...]:
        """Transfers the array at one path of a block; zeros if the block lacks the path."""
        projection, sharding = self.projections[path], self.shardings[path]
        if block is None:
            if path not in self._zeros:
                zeros = np.zeros(block_shape(projection), projection.result_dtype)
                self._zeros[path] = self._transfer(path, zeros)
            return self._zeros[path]
        if sharding.lora_a is None:
            return (jax.device_put(block, self._device),)
        lora_a, lora_b = np.split(block, [projection.sizes[0]], axis=-1)
        return (
            jax.device_put(lora_a, _without_axis(sharding.lora_a, -3)),
            jax.device_put(lora_b, _without_axis(sharding.lora_b, -3)),
        )

    def _cache_g(self, cached: CachedG, kernels: Any, g: Mapping[str, jax.Array]) -> None:
        """Caches the g of an adapter that has been loaded, without waiting for the transfer."""
        pending = (adapter for adapter in self._pending_g if not adapter.has_transferred())
        self._pending_g = list(pending)
        if cached.get(kernels) is None:
            cached.store(kernels, g)
            self._pending_g.append(cached)

    def _finish(
        self, arrays: Arrays, packed: jax.Array, slot: Any, kernels: Mapping[str, Any] | None = None
    ) -> tuple[Arrays, dict[str, jax.Array]]:
        """Writes g, scales and ranks of a slot whose matrices are written; returns the arrays and
        g, which is known unless there are kernels to compute it with."""
        scalings = self._unpacked(arrays, packed)

        def matrix(array: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(array, slot, array.ndim - 3, keepdims=False)

        def g_at(path: str, scaling: Scaling) -> jax.Array:
            if kernels is None:
                return scaling.numerator
            adapter = matrix(arrays[path].lora_a), matrix(arrays[path].lora_b), scaling
            return g_of(self.projections[path], kernels[path], adapter)

        g = {path: g_at(path, scaling) for path, scaling in scalings.items()}
        return with_scalings(arrays, scalings, g, slot), g

    def _unpacked(self, paths: Iterable[str], packed: jax.Array) -> dict[str, Scaling]:
        """Returns the scaling at each path, from a vector of all of them, sorted by path."""
        scalings, start = {}, 0

        def take(*shape: int) -> jax.Array:
            nonlocal start
            size = math.prod(shape)
            part = packed[start : start + size].reshape(shape)
            start += size
            return part

        for path in sorted(paths):
            projection = self.projections[path]
            stack = projection.stack.shape
            numerator = take(*stack, projection.sizes[1]).astype(
                accumulation_dtype(projection.result_dtype)
            )
            scalings[path] = Scaling(numerator, take(*stack) != 0, take(*stack), take(*stack))
        return scalings


def _device_of(base: BaseModel) -> jax.sharding.SingleDeviceSharding | None:
    """Returns the device that the kernels are committed to, or None unless it is a single one."""
    kernels = jax.tree.leaves([kernel.get_value() for kernel in base.kernels.values()])
    committed = [kernel for kernel in kernels if isinstance(kernel, jax.Array) and kernel.committed]
    devices = {device for kernel in committed for device in kernel.devices()}
    return jax.sharding.SingleDeviceSharding(devices.pop()) if len(devices) == 1 else None


def _misfit(kernel: Any, shape: tuple[int, ...], devices: Any) -> str:
    """Returns why a kernel, perhaps quantised, does not fit a bank made for `shape` on these
    devices (an empty set: any), as the end of a sentence; "" if it fits."""
    arrays = [leaf for leaf in jax.tree.leaves(kernel) if isinstance(leaf, jax.Array)]
    if any(array.is_deleted() for array in arrays):
        return "was deleted, perhaps donated to a function; expected a valid array"
    if kernel.shape != shape:
        return f"has shape {kernel.shape}; expected {shape}"
    found = {device for array in arrays if array.committed for device in array.devices()}
    if not devices or found <= devices:
        return ""
    return f"is on {sorted(map(str, found))}; expected {sorted(map(str, devices))}"


def _over_explicit_axes(sharding: jax.NamedSharding) -> jax.NamedSharding:
    """Returns the sharding over the explicit axes of its mesh only."""
    mesh = sharding.mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def explicit(names: Any) -> Any:
        given = names if isinstance(names, tuple) else (names,)
        return tuple(name for name in given if types.get(name) is AxisType.Explicit) or None

    return jax.NamedSharding(mesh, jax.P(*map(explicit, sharding.spec)))


def _without_axis(sharding: Any, axis: int) -> Any:
    """Returns the sharding without the entry for an array axis; None for None."""
    if sharding is None:
        return None
    spec = list(sharding.spec)
    del spec[axis]
    return jax.NamedSharding(sharding.mesh, jax.P(*spec))
