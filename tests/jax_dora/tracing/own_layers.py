"""Modules as people write them without the library, each with weights that its own code reads."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

WIDTH, HIDDEN, EXPERTS, VOCABULARY = 5, 7, 3, 11


def drawn(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape))


class Einsum(nnx.Module):
    """As in Tunix and gemma: an equation, and a parameter `w`."""

    def __init__(self, equation: str, shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.equation = equation
        self.w = drawn(rngs, *shape)
        self.calls = 0

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.equation, x, self.w.get_value().astype(x.dtype))


class Embedder(nnx.Module):
    """A table that is also the output head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = drawn(rngs, VOCABULARY, WIDTH)

    def encode(self, ids: jax.Array) -> jax.Array:
        return self.table[...][ids]

    def decode(self, x: jax.Array) -> jax.Array:
        return x @ self.table[...].T


class Experts(nnx.Module):
    """Packed experts in the three ways that people multiply by them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate = drawn(rngs, EXPERTS, WIDTH, HIDDEN)
        self.up = drawn(rngs, EXPERTS, WIDTH, HIDDEN)
        self.down = drawn(rngs, EXPERTS, HIDDEN, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, WIDTH)
        gate = jnp.einsum("td,edf->etf", rows, self.gate[...])
        up = jnp.stack([rows @ self.up[...][index] for index in range(EXPERTS)])
        mixed = (jnp.tanh(gate) * up).reshape(-1, HIDDEN)
        sizes = jnp.full(EXPERTS, rows.shape[0])
        y = lax.ragged_dot(mixed, self.down[...], sizes)
        return y.reshape(EXPERTS, *x.shape).sum(0)


class Block(nnx.Module):
    """Attention's projections around bare parameters, a scale and a weight that is no product's."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.heads = Einsum("btd,dnh->btnh", (WIDTH, 2, 3), rngs)
        self.out = Einsum("btnh,nhd->btd", (2, 3, WIDTH), rngs)
        self.mix = drawn(rngs, WIDTH, WIDTH)
        self.scale = nnx.Param(jnp.float32(0.3))

    def inner(self, x: jax.Array) -> jax.Array:
        return x @ (self.mix[...] * self.scale[...])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.out(jnp.tanh(self.heads(x)))
        return x + nnx.remat(Block.inner)(self, x)


class Model(nnx.Module):
    """All of them, with a table that the model reads by itself, a counter and a plain layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedder = Embedder(rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.experts = Experts(rngs)
        self.plain = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.odd = drawn(rngs, WIDTH, WIDTH)
        self.unused = drawn(rngs, WIDTH, WIDTH)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, ids: jax.Array) -> dict[str, jax.Array]:
        self.calls[...] += 1
        x = self.embedder.table[...][ids]
        for block in self.blocks:
            x = block(x)
        x = self.plain(x + self.experts(x)) @ jnp.abs(self.odd[...])
        self.last = nnx.Intermediate(x)
        return {"logits": self.embedder.decode(x), "last": x}


def ids() -> jax.Array:
    return jax.random.randint(jax.random.key(3), (2, 4), 0, VOCABULARY)
