"""A bank of adapters for one base model."""

import os
import re
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
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.bank.host import HostAdapter, block_shape, read_adapter, read_folder
from jax_dora.bank.programs import Arrays, BankPrograms, BaseModel
from jax_dora.bank.projections import projections
from jax_dora.layers.base_layer import check_has_values
from jax_dora.ops.bank_slots import checked_ids
from jax_dora.peft.names import Names


@jax.tree_util.register_pytree_node_class
class AdapterBank:
    """Adapters of one model in slots, from which each row of a batch selects one.

    The adapters may be DoRA, LoRA and rsLoRA, with any targets and any ranks up to `max_rank`.

        bank = jax_dora.AdapterBank(model, slots=64, max_rank=64)
        bank = bank.load(0, "adapters/french").load(1, jax_dora.get_adapter(code))

        @jax.jit
        def step(state, bank, tokens, ids):
            return jax_dora.with_bank(nnx.merge(graphdef, state), bank, ids)(tokens)

    A bank is a pytree. Its arrays have room for all slots from the start. `load` and `evict` change
    these arrays in place: they return a new bank that takes over the arrays, and the old bank must
    not be used any more, like any donated argument. Both compile once, when they are first called,
    for adapters of all kinds and ranks.

    An adapter multiplies results by g = magnitude / ‖W + s·lora_a lora_b‖. `load` computes g with
    one norm per projection, and g does not change if the model's kernels change later. The result
    of `read` caches g: while the kernels are the same arrays, loading it again only moves bytes.

    A bank can be copied and pickled, together with its model. As all arrays of JAX, those of an
    unpickled bank are on the default device.

    Attributes:
      slots: the number of slots, which is the largest number of adapters.
      max_rank: the largest rank of an adapter.
      paths: the paths of the projections that have room for adapters.
    """

    def __init__(
        self, model: nnx.Module, slots: int, max_rank: int, *, path: str = ALL_LINEAR
    ) -> None:
        """
        Args:
          model: the plain base model. The bank keeps a reference to it, for the norms of adapters
            that are loaded later.
          slots: the number of slots, at least 1. For every projection, a slot has room for
            (in + out) · max_rank numbers in the projection's dtype, with max_rank rounded up to a
            multiple of 8.
          max_rank: the largest rank of an adapter, at least 1.
          path: selects projections like the path of a `jax_dora.DoRARule`: `nnx.Linear`,
            `nnx.LinearGeneral` and `nnx.Einsum`, also stacked. Other matching layers are left out,
            and loading an adapter that has such a layer raises an error.

        Raises:
          TypeError: `model` is not an nnx module, or a number is not an integer; or a kernel is
            quantised to an unsupported format, is not of floats, or is a value of
            `qwix.quantize_model`.
          ValueError: the model has an adapter or is abstract, a number is below 1, or no
            projection matches; or a quantised kernel has scales that are zero or not finite, or
            tiles along its output axis.
        """
        check_model(model)
        check_has_values(model, "jax_dora.AdapterBank", can_trace=False)
        check_sizes(slots, max_rank)
        self._prepare(model, int(slots), int(max_rank), path)
        self.arrays: Arrays = self._programs.make()

    def _prepare(self, model: nnx.Module, slots: int, max_rank: int, path: str) -> None:
        """Sets everything but the arrays."""
        found = projections(model, path)
        self._base: BaseModel | None = BaseModel(
            model, {projection.path: kernel for projection, kernel in found.items()}
        )
        self._programs = BankPrograms(self._base, slots, max_rank, found)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles the model and the arrays. The programs are made again: they cannot be
        pickled, and depend on the devices of the model's arrays."""
        path = "|".join(map(re.escape, self.paths))
        settings = (self._base_model().model, self.slots, self.max_rank, path)
        return _remade, (settings, self.arrays)

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
    def projections(self) -> Mapping[str, AdaptableWeight]:
        """The projections by path."""
        return self._programs.projections

    def __repr__(self) -> str:
        return f"AdapterBank(slots={self.slots}, max_rank={self.max_rank}, {len(self.paths)} paths)"

    def read(
        self,
        adapter: Adapter | HostAdapter | str | os.PathLike[str],
        *,
        name: str | None = None,
        names: Names | None = None,
    ) -> HostAdapter:
        """Reads an adapter into host memory, checked and in the layout that `load` transfers.

        Use this for an adapter that is loaded more than once.

        Args:
          adapter: an `Adapter`, or a PEFT folder; a result of `read` is only checked.
          name: the adapter's name if the folder has several, as in `jax_dora.peft.load_adapter`.
          names: translates the model's paths to PyTorch's names; `Names()` by default.

        Raises:
          TypeError: `adapter` is neither an `Adapter` nor a path.
          FileNotFoundError, NotADirectoryError: the folder or one of its files does not exist.
          ValueError: the rank exceeds max_rank; or the adapter has a layer that the bank has no
            room for, such as an embedding or a convolution; or an array has a wrong shape or is
            not finite; or the folder is damaged or does not match the model.
          NotImplementedError: the folder replaces parameters of the base model, or has something
            that is not supported.
        """
        model, projections = self._base_model().model, list(self.projections.values())
        if isinstance(adapter, HostAdapter):
            self._check_fits(adapter)
            read = adapter
        elif isinstance(adapter, Adapter):
            check_has_values(adapter.arrays, "AdapterBank.load", name="adapter", can_trace=False)
            read = read_adapter(model, projections, adapter)
        elif isinstance(adapter, str | os.PathLike):
            read = read_folder(model, projections, adapter, name, names)
        else:
            raise TypeError(
                f"adapter is a {type(adapter).__name__}; expected an Adapter from get_adapter, or "
                "a PEFT folder"
            )
        for path, scaling in read.scalings.items():
            check_room(int(np.max(scaling.rank)), path, self.max_rank)
        return read

    def load(
        self,
        slot: int,
        adapter: Adapter | HostAdapter | str | os.PathLike[str],
        *,
        name: str | None = None,
        names: Names | None = None,
    ) -> "AdapterBank":
        """Returns the bank with an adapter in a slot, which replaces the slot's previous adapter.

        The result takes over this bank's arrays. If one of the errors below is raised, nothing has
        changed and this bank remains usable.

        Args:
          slot: a slot from 0 to slots - 1.
          adapter: an `Adapter`, a PEFT folder, or a result of `read`.
          name, names: the same as for `read`.

        Raises:
          TypeError, ValueError, FileNotFoundError, NotADirectoryError, NotImplementedError: the
            same errors as `read`; or `slot` is not a slot. TypeError also if `load` is called in a
            function that JAX traces. ValueError also if a kernel of the model was deleted, or has
            another shape or other devices than when the bank was made.
        """
        check_slot(slot, self.slots)
        number = np.int32(slot)
        # In a traced function, even a number from the host becomes a tracer.
        arrays = (jax.device_put(number), *jax.tree.leaves(self.arrays))
        if any(isinstance(array, Tracer) for array in arrays):
            raise TypeError(
                "load is called in a function that JAX traces; expected a call outside: load first "
                "and pass the bank to the function as an argument, which does not recompile it"
            )
        host, kernels = self.read(adapter, name=name, names=names), self.kernels()
        self._programs.check_kernels(kernels)
        loaded = self._programs.load(self.arrays, host, kernels, int(number))
        return self.tree_unflatten(self._programs, (loaded,))

    def evict(self, slot: int) -> "AdapterBank":
        """Returns the bank with an empty slot. The result takes over this bank's arrays.

        Raises:
          TypeError, ValueError: `slot` is not a slot.
        """
        check_slot(slot, self.slots)
        arrays = self._programs.clear(self.arrays, self._programs.number(int(slot)))
        return self.tree_unflatten(self._programs, (arrays,))

    def checked(self, adapter_ids: Any) -> jax.Array:
        """Returns the ids as i32[batch], with ids out of range replaced by `slots`.

        Raises the same errors as `with_bank` if the ids are known.
        """
        if not isinstance(adapter_ids, jax.Array | np.ndarray):
            # NumPy would convert an empty list to floats.
            adapter_ids = np.asarray(adapter_ids, None if np.size(adapter_ids) else np.int32)
        is_integer = jnp.issubdtype(adapter_ids.dtype, jnp.integer)
        check_ids_array(adapter_ids, are_integers=is_integer)
        if not isinstance(adapter_ids, Tracer):
            check_ids(np.asarray(adapter_ids).tolist(), self.slots, self._empty_slots())
        return checked_ids(jnp.asarray(adapter_ids), self.slots)

    def _empty_slots(self) -> set[int]:
        """Returns the slots without an adapter, or an empty set if the bank's arrays are traced."""
        path, projection = next(iter(self.projections.items()))
        g = self.arrays[path].g
        if isinstance(g, Tracer):
            return set()
        # Reduces over all features, since one feature alone cannot be indexed if they are sharded
        # over explicit mesh axes.
        with jax.ensure_compile_time_eval():  # The bank may be a constant of a traced function.
            is_empty = np.asarray(jnp.isnan(g).all(axis=-1))[(0,) * projection.stack.count]
        return set(np.flatnonzero(is_empty).tolist())

    def kernels(self) -> dict[str, Any]:
        """Returns the current kernels of the model, by path."""
        return {path: kernel.get_value() for path, kernel in self._base_model().kernels.items()}

    def _base_model(self) -> BaseModel:
        """Returns the base model with its kernels, or raises ValueError if it is gone."""
        if self._base is None:
            raise ValueError(
                "the bank was rebuilt from its arrays after its model, and every bank with this "
                "model, was deleted; keep a reference to one of them, or make a new AdapterBank"
            )
        return self._base

    def _check_fits(self, adapter: HostAdapter) -> None:
        """Raises ValueError unless the adapter was read by a bank with the same projections."""
        found = {path: scaling.numerator.shape for path, scaling in adapter.scalings.items()}
        expected = {
            path: (*projection.stack.shape, projection.sizes[1])
            for path, projection in self.projections.items()
        }
        shapes = {path: block_shape(projection) for path, projection in self.projections.items()}
        if found != expected or any(
            array.shape != shapes[path]
            for block in adapter.rank_blocks
            for path, array in block.items()
        ):
            raise ValueError(
                "adapter was read by the bank of another model; expected one that this bank has "
                "read, or a bank of the same model and path="
            )


def _remade(settings: tuple[nnx.Module, int, int, str], arrays: Arrays) -> AdapterBank:
    """Returns the bank that `AdapterBank.__reduce__` took apart."""
    bank = object.__new__(AdapterBank)
    bank._prepare(*settings)
    bank.arrays = arrays
    return bank
