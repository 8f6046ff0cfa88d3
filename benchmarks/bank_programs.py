"""The programs of the level `bank`: the projections of decoder layers, with a bank."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jax_dora
from benchmarks.model.protocol import Protocol
from jax_dora.bank import BankArray
from jax_dora.lm.models.layer_stack import unstacked


def without_g(bank: Any) -> Any:
    """Returns a copy of a bank that does not multiply rows by g: a bank of LoRA adapters."""
    bank = jax.tree.unflatten(jax.tree.structure(bank), jax.tree.leaves(bank))
    bank.arrays = {path: array._replace(g=None) for path, array in bank.arrays.items()}
    return bank


def bank_of_kind(kind: str, bank: Any) -> Any:
    """Returns the part of a bank that the program of a kind takes."""
    if kind == "base":
        return None
    return without_g(bank) if kind == "LoRA" else bank


class Block(nnx.Module):
    """The projections of a decoder layer, without attention."""

    def __init__(self, sizes: Protocol, rngs: nnx.Rngs) -> None:
        for name, (n_in, n_out) in sizes.projections().items():
            linear = nnx.Linear(n_in, n_out, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)
            setattr(self, name, linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        def project(x: jax.Array, *names: str) -> list[jax.Array]:
            return jax_dora.apply_layers([getattr(self, name) for name in names], x)

        q, k, v = project(normalised(x), "q_proj", "k_proj", "v_proj")
        # Instead of attention, a sum that reads q, k and v.
        (attended,) = project(q + jnp.tile(k + v, x.shape[-1] // k.shape[-1]), "o_proj")
        x = x + attended
        gate, up = project(normalised(x), "gate_proj", "up_proj")
        (down,) = project(nnx.silu(gate) * up, "down_proj")
        return x + down


def normalised(x: jax.Array) -> jax.Array:
    """Returns x divided by its root mean square."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


class Stack(nnx.Module):
    """Several layers whose arrays are stacked along a leading axis, called one after another."""

    def __init__(self, sizes: Protocol, layers: int) -> None:
        def make(key: jax.Array) -> Block:
            return Block(sizes, nnx.Rngs(key))

        keys = jax.random.split(jax.random.key(0), layers)
        graphdef = nnx.graphdef(nnx.eval_shape(make, keys[0]))
        self.layers = nnx.merge(graphdef, lax.map(lambda key: nnx.state(make(key)), keys))

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, bank, arrays = nnx.split(self.layers, BankArray, ...)
        for one in unstacked(arrays, jax.tree.leaves(arrays)[0].shape[0], inference=True):
            x = nnx.merge(graphdef, bank, one)(x)
        return x


def program(graphdef: Any) -> Callable[..., jax.Array]:
    """Returns a function of (state, bank, ids, x), with the bank from `bank_of_kind`, that returns
    the result of all layers [rows, tokens, hidden].

    As in a server's step there is no loop, because XLA would copy each layer's kernels out of the
    stack in a loop.
    """

    def run(state: Any, bank: Any, ids: jax.Array, x: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        return (model if bank is None else jax_dora.with_bank(model, bank, ids))(x)

    return run
