"""The bank of a server: adapters in slots as requests come. A server of the base alone has none."""

import re

import jax
import numpy as np

import jax_dora
from jax_dora.bank.residents import Residents
from jax_dora.models import CausalLM

# The layers' projections; a head and an embedding have no adapters here.
PATH = "model/layers/.*_proj"


def make_bank(model: CausalLM, slots: int, max_rank: int) -> Residents:
    """Returns the slots of an empty bank, for the engine's thread.

    Args:
      model: without adapters.
    """
    return Residents(jax_dora.AdapterBank(model, slots, max_rank, path=PATH))


def warm_up(bank: Residents, model: CausalLM) -> None:
    """Compiles what changes slots, with an adapter of zeros that is gone afterwards."""
    layers, n_in, out = model.model.layers.mlp.up_proj.kernel.shape
    path = "model/layers/mlp/up_proj"
    arrays = {
        "lora_a": np.zeros((layers, n_in, 1), np.float32),
        "lora_b": np.zeros((layers, 1, out), np.float32),
        "magnitude": np.ones((layers, out), np.float32),
    }
    rule = jax_dora.DoRARule(re.escape(path), rank=1, alpha=1.0)
    bank.bank = bank.bank.load(0, jax_dora.Adapter((rule,), {path: arrays})).evict(0)
    jax.block_until_ready(bank.bank)


def with_adapters(
    model: CausalLM, bank: jax_dora.AdapterBank | None, adapters: jax.Array
) -> CausalLM:
    """Returns the model with the bank's adapters i32[rows] on its rows."""
    return model if bank is None else jax_dora.with_bank(model, bank, adapters)
