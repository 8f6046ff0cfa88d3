"""The bank of a server: adapters in slots as requests come, or none."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_dora
from jax_dora.bank.residents import Residents
from jax_dora.models import CausalLM
from jax_dora.serve.adapters import Served

# The layers' projections; a head and an embedding have no adapters here.
PATH = "model/layers/.*_proj"


class Bank:
    """Slots of a `jax_dora.AdapterBank`, or none where nothing but the base is served.

    Used by the engine's thread alone, but for `read`.
    """

    def __init__(self, model: CausalLM, slots: int, max_rank: int) -> None:
        """
        Args:
          model: without adapters.
          slots: 0 for none.
        """
        made = jax_dora.AdapterBank(model, slots, max_rank, path=PATH) if slots else None
        self._residents = Residents(made) if made else None

    @property
    def bank(self) -> Any:
        """Returns the bank as it is now; None where there is none."""
        return self._residents and self._residents.bank

    @property
    def arrays(self) -> Any:
        """Returns what compiled programs take for their adapters."""
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
        return self._residents is not None and adapter in self._residents

    def pin(self, adapter: Served) -> int | None:
        """Returns the slot in which an adapter lies until it is unpinned as often; None where
        every slot is pinned for others."""
        assert self._residents is not None
        return self._residents.pin(adapter, adapter.value)

    def unpin(self, adapter: Served) -> None:
        """Takes one pin back."""
        assert self._residents is not None
        self._residents.unpin(adapter)

    @property
    def pinned(self) -> int:
        """Returns how many slots no other adapter may have now."""
        return self._residents.pinned if self._residents else 0

    def warm_up(self, model: CausalLM) -> None:
        """Compiles what changes slots, with an adapter of zeros that is gone afterwards."""
        if self._residents is None:
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
        self._residents.bank = self.bank.load(0, zeros).evict(0)
        jax.block_until_ready(self.bank)


def on(model: CausalLM, bank: Any, adapters: jax.Array) -> CausalLM:
    """Returns the model with the bank's adapters i32[rows] on its rows."""
    return model if bank is None else jax_dora.with_bank(model, bank, adapters)
