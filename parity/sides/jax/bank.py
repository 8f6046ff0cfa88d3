"""A mixed batch over a bank of adapters in jax_dora."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_dora
from parity.bank_cases import RANKS, Adapter, Found, Problem
from parity.sides.jax.operators import kernel_names


class Model(nnx.Module):
    """A model with one projection."""

    def __init__(self, projection: nnx.Linear) -> None:
        self.proj = projection

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.proj(x)


def rows(problem: Problem, folders: Sequence[Path], device: str) -> Found:
    """Returns the batch's rows, computed on JAX's default device."""
    out, into = problem.weight.shape
    options: Any = {"param_dtype": problem.dtype, "precision": "highest", "rngs": nnx.Rngs(0)}
    base = nnx.Linear(into, out, **options)
    base.kernel.set_value(jnp.asarray(problem.weight.T, problem.dtype))
    assert base.bias is not None
    base.bias.set_value(jnp.asarray(problem.bias, problem.dtype))
    bank = jax_dora.AdapterBank(Model(base), len(problem.adapters) + 1, max(RANKS))
    for slot, (adapter, folder) in enumerate(zip(problem.adapters, folders, strict=True)):
        bank = bank.load(slot, folder if adapter.from_folder else _object(adapter))
    graphdef, state = nnx.split(Model(base))

    @jax.jit
    def both(state: Any, bank: Any, ids: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return jax_dora.with_bank(model, bank, ids)(x), model(x)

    x = jnp.asarray(problem.x, problem.dtype)
    program = both.lower(state, bank, jnp.asarray(problem.ids), x)
    found = program.compile()(state, bank, jnp.asarray(problem.ids), x)
    adapted, plain = (np.asarray(array, np.float64) for array in found)
    return Found(adapted, plain, kernel_names(program))


def _object(adapter: Adapter) -> jax_dora.Adapter:
    arrays = {name: array.T for name, array in adapter.arrays.items()}
    rule = jax_dora.DoRARule("proj", **adapter.options)
    return jax_dora.Adapter((rule,), {"proj": arrays})
