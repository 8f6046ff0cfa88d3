"""The programs of level `bank`: a decoder's projections, by a bank and by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jax_dora
from benchmarks.model.protocol import Protocol
from jax_dora.bank.layers import BankArray, apply_together
from jax_dora.models.decoder import unstacked
from jax_dora.ops.bank_slots import Slots


def without_g(bank: Any) -> Any:
    """Returns a copy of a bank whose g no row is multiplied by: LoRA's."""
    bank = jax.tree.unflatten(jax.tree.structure(bank), jax.tree.leaves(bank))
    bank.arrays = {path: one._replace(g=None) for path, one in bank.arrays.items()}
    return bank


def of_kind(kind: str, bank: Any) -> Any:
    """Returns the part of a bank that a kind's program takes."""
    if kind == "base":
        return None
    if kind == "one-hot":
        return {path: one._replace(g=None, rank=None) for path, one in bank.arrays.items()}
    return without_g(bank) if kind == "LoRA" else bank


class Block(nnx.Module):
    """A decoder layer's projections, without attention."""

    def __init__(self, sizes: Protocol, rngs: nnx.Rngs) -> None:
        for name, (into, out) in sizes.projections().items():
            linear = nnx.Linear(into, out, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)
            setattr(self, name, linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        def by(x: jax.Array, *names: str) -> list[jax.Array]:
            return apply_together([getattr(self, name) for name in names], x)

        return layer(x, by)


def layer(x: jax.Array, by: Callable[..., Sequence[jax.Array]]) -> jax.Array:
    """Returns the result of a layer for x, `by` being the projections of an input by their
    names."""
    q, k, v = by(normalised(x), "q_proj", "k_proj", "v_proj")
    # Whatever attention does, it reads all three.
    (attended,) = by(q + jnp.tile(k + v, x.shape[-1] // k.shape[-1]), "o_proj")
    x = x + attended
    gate, up = by(normalised(x), "gate_proj", "up_proj")
    (down,) = by(nnx.silu(gate) * up, "down_proj")
    return x + down


def normalised(x: jax.Array) -> jax.Array:
    """Returns x over its root mean square."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


class Stack(nnx.Module):
    """Layers as one module whose arrays have a leading axis, called one after the other, as a
    server's step calls them."""

    def __init__(self, sizes: Protocol, layers: int) -> None:
        def make(key: jax.Array) -> Block:
            return Block(sizes, nnx.Rngs(key))

        keys = jax.random.split(jax.random.key(0), layers)
        graphdef = nnx.graphdef(nnx.eval_shape(make, keys[0]))
        self.layers = nnx.merge(graphdef, lax.map(lambda key: nnx.state(make(key)), keys))

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, bank, arrays = nnx.split(self.layers, BankArray, ...)
        for one in unstacked(arrays, jax.tree.leaves(arrays)[0].shape[0]):
            x = nnx.merge(graphdef, bank, one)(x)
        return x


def one_hot(x: jax.Array, ids: jax.Array, kernel: jax.Array, slots: Slots) -> jax.Array:
    """Returns x W + s·x A B by products with all slots."""
    chosen = jax.nn.one_hot(ids, slots.lora_a.shape[0], dtype=x.dtype)
    z = jnp.einsum("bti,sri->btsr", x, slots.lora_a)
    z = z * (chosen * slots.scale.astype(x.dtype)[None])[:, None, :, None]
    return x @ kernel + jnp.einsum("btsr,sro->bto", z, slots.lora_b)


def program(kind: str, graphdef: Any) -> Callable[..., jax.Array]:
    """Returns the result [rows, tokens, hidden] of all layers as a function of (state, `of_kind` a
    bank, ids, x).

    Nothing is in a loop, as in a server's step: XLA would copy each layer's kernels out of their
    stack there.
    """
    if kind == "one-hot":
        return _one_hot

    def run(state: Any, bank: Any, ids: jax.Array, x: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        if bank is None:
            return model(x)
        return jax_dora.with_bank(model, bank, ids)(x)

    return run


def _one_hot(state: Any, bank: dict[str, Slots], ids: jax.Array, x: jax.Array) -> jax.Array:
    kernels = {path[1]: variable.get_value() for path, variable in nnx.to_flat_state(state)}
    pairs = {name: (kernel, bank[f"layers/{name}"]) for name, kernel in kernels.items()}
    for one in unstacked(pairs, len(kernels["q_proj"])):

        def by(x: jax.Array, *names: str, pairs: Any = one) -> list[jax.Array]:
            return [one_hot(x, ids, *pairs[name]) for name in names]

        x = layer(x, by)
    return x
