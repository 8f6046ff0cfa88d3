"""A bank: the adapters of all slots, beside one base model."""

import os
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from dora_common.rules import ALL_LINEAR
from dora_common.slots import check_ids, check_ids_array, check_room, check_sizes, check_slot
from jax_dora.adapt.adapter import Adapter
from jax_dora.adapt.tree import check_model
from jax_dora.bank.host import HostAdapter, piece_shape, read_adapter, read_folder
from jax_dora.bank.programs import Arrays, BankPrograms, BaseModel
from jax_dora.bank.projections import BankProjection, projections
from jax_dora.ops.bank_slots import checked_ids
from jax_dora.peft.names import Names


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
    is loaded, by one norm a projection; it stays if the model's kernels change afterwards. What
    `read` has returned keeps it: while the kernels are the same arrays, to load that again moves
    bytes alone.

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
        check_sizes(slots, max_rank)
        found = projections(model, path)
        self._base: BaseModel | None = BaseModel(
            model, {one.path: kernel for one, kernel in found.items()}
        )
        self._programs = BankPrograms(self._base, int(slots), int(max_rank), found)
        self.arrays: Arrays = self._programs.make()

    def tree_flatten(self) -> tuple[tuple[Arrays], BankPrograms]:
        return (self.arrays,), self._programs

    @classmethod
    def tree_unflatten(cls, plan: BankPrograms, children: tuple[Arrays]) -> Self:
        bank = object.__new__(cls)
        bank._base, bank._programs, bank.arrays = plan.base(), plan, children[0]
        return bank

    @property
    def slots(self) -> int:
        return self._programs.slots

    @property
    def max_rank(self) -> int:
        return self._programs.max_rank

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._programs.projections)

    @property
    def projections(self) -> Mapping[str, BankProjection]:
        """Returns the projections by path."""
        return self._programs.projections

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
        model, found = self._base_model().model, list(self.projections.values())
        if isinstance(adapter, Adapter):
            read = read_adapter(model, found, adapter)
        elif isinstance(adapter, str | os.PathLike):
            read = read_folder(model, found, adapter, name, names)
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
            `read`; or `slot` is no slot. TypeError also in a function that JAX traces.
        """
        number = self._slot(slot)
        # A number from the host is traced too, where jax.jit and its like are at work.
        arrays = (jax.device_put(number), *jax.tree.leaves(self.arrays))
        if any(isinstance(one, Tracer) for one in arrays):
            raise TypeError(
                "load is called in a function that JAX traces; expected a call outside: load first "
                "and give the function the bank as an argument, which compiles nothing anew"
            )
        if isinstance(adapter, HostAdapter):
            self._check_fits(adapter)
            self._check_rank(adapter)
            host = adapter
        else:
            host = self.read(adapter, name=name, names=names)
        loaded = self._programs.load(self.arrays, host, self.kernels(), int(number))
        return self.tree_unflatten(self._programs, (loaded,))

    def evict(self, slot: int) -> "AdapterBank":
        """Returns the bank without the adapter of a slot, if it held one, on this bank's arrays.

        Raises:
          TypeError, ValueError: `slot` is no slot.
        """
        arrays = self._programs.clear(self.arrays, self._slot(slot))
        return self.tree_unflatten(self._programs, (arrays,))

    def checked(self, adapter_ids: Any) -> jax.Array:
        """Returns a batch's slots as i32[batch], with `slots` in place of an id that is out of
        range; raises as `with_bank` where the ids are known."""
        if not isinstance(adapter_ids, jax.Array | np.ndarray):
            # A list of no ids would be one of floats.
            adapter_ids = np.asarray(adapter_ids, None if np.size(adapter_ids) else np.int32)
        is_integer = jnp.issubdtype(adapter_ids.dtype, jnp.integer)
        check_ids_array(adapter_ids, are_integers=is_integer)
        if not isinstance(adapter_ids, Tracer):
            check_ids(np.asarray(adapter_ids).tolist(), self.slots, self._empty_slots())
        return checked_ids(jnp.asarray(adapter_ids), self.slots)

    def _empty_slots(self) -> set[int]:
        """Returns the slots without an adapter, where the bank's arrays are known."""
        path, projection = next(iter(self.projections.items()))
        g = self.arrays[path].g
        if isinstance(g, Tracer):
            return set()
        # Of all features: where explicit axes of a mesh share them, none can be taken alone.
        is_empty = np.asarray(jnp.isnan(g).all(axis=-1))[(0,) * projection.stack.count]
        return set(np.flatnonzero(is_empty).tolist())

    def kernels(self) -> dict[str, Any]:
        """Returns the kernels of the model as they are now."""
        return {path: kernel.get_value() for path, kernel in self._base_model().kernels.items()}

    def _base_model(self) -> BaseModel:
        """Returns the model that the bank is beside, with its kernels."""
        if self._base is None:
            raise ValueError(
                "the bank was rebuilt from its arrays when its model was gone, and every bank that "
                "held it; keep one of them meanwhile, or make a new AdapterBank"
            )
        return self._base

    def _slot(self, slot: Any) -> np.int32:
        check_slot(slot, self.slots)
        return np.int32(slot)

    def _check_rank(self, adapter: HostAdapter) -> None:
        for path, facts in adapter.facts.items():
            check_room(int(np.max(facts.rank)), path, self.max_rank)

    def _check_fits(self, adapter: HostAdapter) -> None:
        """Raises ValueError unless the adapter was read for a bank like this."""
        facts = {path: one.magnitude.shape for path, one in adapter.facts.items()}
        wanted = {path: (*one.stack.shape, one.sizes[1]) for path, one in self.projections.items()}
        shapes = {path: piece_shape(one) for path, one in self.projections.items()}
        if facts != wanted or any(
            array.shape != shapes[path] for piece in adapter.pieces for path, array in piece.items()
        ):
            raise ValueError(
                "adapter was read by the bank of another model; expected one that this bank has "
                "read, or a bank of the same model and path="
            )
