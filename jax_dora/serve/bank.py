"""Which adapter lies in which slot of a bank: loaded as requests come, the least recently used out,
pinned while a request runs."""

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_dora
from jax_dora.models import CausalLM
from jax_dora.serve.adapters import Served

# The layers' projections; a head and an embedding have no adapters here.
PATH = "model/layers/.*_proj"


class Bank:
    """Slots of a `jax_dora.AdapterBank`, or none where nothing but the base is served.

    Used by the engine's thread alone, but for `read`.

    Attributes:
      bank: as it is now; None where there is none.
    """

    def __init__(self, model: CausalLM, slots: int, max_rank: int) -> None:
        """
        Args:
          model: without adapters.
          slots: 0 for none.
        """
        self.bank: Any = jax_dora.AdapterBank(model, slots, max_rank, path=PATH) if slots else None
        self._slots: OrderedDict[Served, int] = OrderedDict()  # the least recently used first
        self._free = list(range(slots))
        self._pins: dict[Served, int] = {}

    @property
    def arrays(self) -> Any:
        """What compiled programs take for their adapters."""
        return self.bank

    def read(self, folder: Path) -> Any:
        """Returns the adapter of a PEFT folder in host memory, as slots take it.

        Raises:
          FileNotFoundError, ValueError, TypeError, NotImplementedError: it is damaged, does not fit
            the model, or its rank is too large.
        """
        return self.bank.read(folder)

    def holds(self, adapter: Served) -> bool:
        """Returns whether it lies in a slot."""
        return adapter in self._slots

    def pin(self, adapter: Served) -> int | None:
        """Returns the slot in which an adapter lies until it is unpinned as often; None where
        every slot is pinned for others."""
        if adapter not in self._slots:
            slot = self._empty()
            if slot is None:
                return None
            try:
                self.bank = self.bank.load(slot, adapter.value)
            except BaseException:
                self._free.append(slot)
                raise
            self._slots[adapter] = slot
        self._slots.move_to_end(adapter)
        self._pins[adapter] = self._pins.get(adapter, 0) + 1
        return self._slots[adapter]

    def unpin(self, adapter: Served) -> None:
        """Takes one pin back."""
        self._pins[adapter] -= 1
        if not self._pins[adapter]:
            del self._pins[adapter]

    @property
    def pinned(self) -> int:
        """How many slots no other adapter may have now."""
        return len(self._pins)

    def warm_up(self, model: CausalLM) -> None:
        """Compiles what changes slots, with an adapter of zeros that is gone afterwards."""
        if self.bank is None:
            return
        layers, n_in, out = model.model.layers.mlp.up_proj.kernel.shape
        path = "model/layers/mlp/up_proj"
        arrays = {
            "lora_a": np.zeros((layers, n_in, 1), np.float32),
            "lora_b": np.zeros((layers, 1, out), np.float32),
            "magnitude": np.ones((layers, out), np.float32),
        }
        rule = jax_dora.DoRARule(re.escape(path), rank=1, alpha=1.0)
        zeros = self.bank.read(jax_dora.Adapter((rule,), {path: arrays}))
        self.bank = self.bank.load(0, zeros).evict(0)
        jax.block_until_ready(self.bank)

    def _empty(self) -> int | None:
        """Returns a slot to load into, its adapter forgotten."""
        if self._free:
            return self._free.pop()
        oldest = next((one for one in self._slots if one not in self._pins), None)
        return None if oldest is None else self._slots.pop(oldest)


def on(model: CausalLM, bank: Any, adapters: jax.Array) -> CausalLM:
    """Returns the model with the bank's adapters i32[rows] on its rows."""
    return model if bank is None else jax_dora.with_bank(model, bank, adapters)
