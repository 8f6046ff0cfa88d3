"""A bank: the adapters of all slots, beside one base model."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType

from dora_common.hyperparameters import check_rank, check_slots
from dora_common.rules import ALL_LINEAR
from jax_dora import ops
from jax_dora.adapt.adapter import Adapter
from jax_dora.adapt.tree import check_model
from jax_dora.bank.host import RANKS, Facts, HostAdapter, read_adapter, read_folder
from jax_dora.bank.places import Place, places
from jax_dora.layers.call import bounded_norm
from jax_dora.ops.bank import Slots
from jax_dora.ops.compose import accumulator
from jax_dora.peft.names import Names

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
        lead, wide = (*place.stack, self.slots), accumulator(place.dtype)
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
            piece = tuple(np.zeros((*place.stack, RANKS, n), place.dtype) for n in place.sizes)
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


@jax.tree_util.register_pytree_node_class
class AdapterBank:
    """Adapters of one model in slots, for rows of one batch: DoRA, LoRA and rsLoRA, of any targets
    and any ranks up to `max_rank`.

        bank = jax_dora.AdapterBank(model, slots=64, max_rank=64)
        bank = bank.load(0, "adapters/french").load(1, jax_dora.get_adapter(code))

        @jax.jit
        def step(state, bank, tokens, ids):
            return jax_dora.with_bank(nnx.merge(graphdef, state), bank, ids)(tokens)

    A pytree, whose arrays have room for every slot from the start. `load` and `evict` change them
    in place: they return a bank on the arrays of this one, which is not to be used any more, as
    after any call that an argument is donated to. They compile once, when first called, for
    adapters of all kinds and ranks.

    What an adapter multiplies results by, g = magnitude / ‖W + s·lora_a lora_b‖, is taken when it
    is loaded, by one norm a projection; it stays if the model's kernels change afterwards.

    Attributes:
      slots: how many adapters it has room for.
      max_rank: the largest rank of an adapter.
      paths: of the projections that it holds adapters of.
    """

    def __init__(
        self, model: nnx.Module, slots: int, max_rank: int, *, path: str = ALL_LINEAR
    ) -> None:
        """
        Args:
          model: the plain base model. The bank keeps it, for the norms of what is loaded later.
          slots: at least 1. One takes (in + out) · max_rank numbers of every projection, in its
            dtype, rounded up to ranks in eights.
          max_rank: the largest rank of an adapter, at least 1.
          path: which projections, as `jax_dora.DoRARule`'s: `nnx.Linear`, `nnx.LinearGeneral` and
            `nnx.Einsum`, also stacked. Other layers that match are left out, and an adapter of
            theirs is refused when it is loaded.

        Raises:
          TypeError: `model` is no nnx module, or a number no integer.
          ValueError: the model holds an adapter, a number is below 1, or no projection matches.
        """
        check_model(model)
        check_slots(slots)
        check_rank(max_rank)
        self._plan = Plan(model, slots, int(max_rank), places(model, path))
        self.arrays: Arrays = self._plan.make()

    def tree_flatten(self) -> tuple[tuple[Arrays], Plan]:
        return (self.arrays,), self._plan

    @classmethod
    def tree_unflatten(cls, plan: Plan, children: tuple[Arrays]) -> Self:
        bank = object.__new__(cls)
        bank._plan, bank.arrays = plan, children[0]
        return bank

    @property
    def slots(self) -> int:
        return self._plan.slots

    @property
    def max_rank(self) -> int:
        return self._plan.max_rank

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._plan.places)

    @property
    def places(self) -> Mapping[str, Place]:
        """The projections by path."""
        return self._plan.places

    def __repr__(self) -> str:
        return f"AdapterBank(slots={self.slots}, max_rank={self.max_rank}, {len(self.paths)} paths)"

    def read(
        self,
        adapter: Adapter | str | os.PathLike[str],
        *,
        name: str | None = None,
        names: Names | None = None,
    ) -> HostAdapter:
        """Returns an adapter in host memory, checked and laid out so that `load` has only to send
        it: what is loaded more than once is read once.

        Args:
          adapter: an `Adapter`, or a PEFT folder.
          name: of the adapter, where a folder has several, as `jax_dora.peft.load_adapter`'s.
          names: how PyTorch calls the modules of the model; `Names()` by default.

        Raises:
          TypeError: `adapter` is neither.
          FileNotFoundError, NotADirectoryError: there is no such folder, or a file is missing.
          ValueError: its rank exceeds max_rank; it has a layer that the bank has no room for, such
            as an embedding or a convolution, or arrays of another shape, or that are not finite; a
            folder is damaged or does not fit the model.
          NotImplementedError: a folder replaces parameters of the base model, or asks for what is
            not supported.
        """
        plan = self._plan
        found = list(plan.places.values())
        if isinstance(adapter, Adapter):
            read = read_adapter(plan.model, found, adapter)
        elif isinstance(adapter, str | os.PathLike):
            read = read_folder(plan.model, found, adapter, name, names)
        else:
            raise TypeError(
                f"adapter is a {type(adapter).__name__}; expected an Adapter from get_adapter, or "
                "a PEFT folder"
            )
        self._check_rank(read)
        return read

    def load(
        self,
        slot: int,
        adapter: Adapter | HostAdapter | str | os.PathLike[str],
        *,
        name: str | None = None,
        names: Names | None = None,
    ) -> "AdapterBank":
        """Returns the bank with an adapter in a slot, in the place of what it held.

        Nothing is changed where it raises, and this bank can be used on; otherwise its arrays are
        the result's.

        Args:
          slot: from 0 to slots - 1.
          adapter: an `Adapter`, a PEFT folder, or what `read` has returned.
          name, names: as `read`'s.

        Raises:
          TypeError, ValueError, FileNotFoundError, NotADirectoryError, NotImplementedError: as
            `read`; or `slot` is no slot.
        """
        number = self._slot(slot)
        if isinstance(adapter, HostAdapter):
            self._check_fits(adapter)
            self._check_rank(adapter)
            host = adapter
        else:
            host = self.read(adapter, name=name, names=names)
        plan = self._plan
        pieces = [
            {path: plan.on_device(path, piece.get(path)) for path in plan.places}
            for piece in host.pieces
        ]
        arrays = plan.clear(self.arrays, number)
        for index, piece in enumerate(pieces):
            arrays = plan.write(arrays, piece, number, np.int32(index * RANKS))
        return self._with(plan.finish(arrays, plan.kernels(), dict(host.facts), number))

    def evict(self, slot: int) -> "AdapterBank":
        """Returns the bank without the adapter of a slot, if it held one, on this bank's arrays.

        Raises:
          TypeError, ValueError: `slot` is no slot.
        """
        return self._with(self._plan.clear(self.arrays, self._slot(slot)))

    def _with(self, arrays: Arrays) -> "AdapterBank":
        return self.tree_unflatten(self._plan, (arrays,))

    def _slot(self, slot: Any) -> np.int32:
        if isinstance(slot, bool) or not isinstance(slot, int | np.integer):
            raise TypeError(f"slot is {slot!r}, a {type(slot).__name__}; expected an integer")
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot is {slot}; expected 0 to {self.slots - 1}")
        return np.int32(slot)

    def _check_rank(self, adapter: HostAdapter) -> None:
        for path, facts in adapter.facts.items():
            if (rank := int(np.max(facts.rank))) > self.max_rank:
                raise ValueError(
                    f"adapter has rank {rank} for {path!r}; expected at most {self.max_rank}, "
                    "the bank's max_rank: make the bank with a larger one"
                )

    def _check_fits(self, adapter: HostAdapter) -> None:
        """Raises ValueError unless the adapter was read for a bank like this."""
        shapes = {path: place.sizes for path, place in self.places.items()}
        fits = adapter.facts.keys() == shapes.keys() and all(
            adapter.facts[path].magnitude.shape == (*place.stack, place.sizes[1])
            for path, place in self.places.items()
        )
        fits = fits and all(
            (a.shape[-1], b.shape[-1]) == shapes[path]
            for piece in adapter.pieces
            for path, (a, b) in piece.items()
        )
        if not fits:
            raise ValueError(
                "adapter was read by the bank of another model; expected what this bank's read, or "
                "one's of the same model and path=, has returned"
            )


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

    def g_of_layer(one: Any) -> jax.Array:
        kernel, lora_a, lora_b, facts = one
        return lax.cond(
            facts.is_dora,
            lambda: _dora_g(place, kernel, lora_a, lora_b, facts),
            lambda: jnp.ones_like(facts.magnitude),
        )

    function: Callable[[Any], jax.Array] = g_of_layer
    for _ in place.stack:
        function = _along_stack(function)
    g = function((kernel, lora_a, lora_b, facts))

    def written(array: jax.Array, new: jax.Array) -> jax.Array:
        axis = len(place.stack)
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


def _along_stack(function: Callable[[Any], jax.Array]) -> Callable[[Any], jax.Array]:
    """Returns what takes a stack one layer after the other: a norm may have a temporary as large as
    the kernel."""
    return lambda arrays: lax.map(function, arrays)
