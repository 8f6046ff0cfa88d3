"""Decoders as bonsai writes them, in miniature and by its description: on an explicit mesh for FSDP
and tensor parallelism, where every product says how its result is sharded."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P

WIDTH, HIDDEN, HEADS, VOCABULARY, LAYERS = 8, 12, 2, 16, 2
ACTIVATION, IN, OUT = P("fsdp", None, "tp"), P("fsdp", "tp"), P("tp", "fsdp")
HEAD_AXES = P("fsdp", None, "tp", None)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * jnp.float32(0.5)
    mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    masked = jnp.where(jnp.broadcast_to(mask, logits.shape), logits, jnp.float32(-1e9))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(masked), v)


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


class FlaxLayer(nnx.Module):
    """As in its Qwen3: Flax's layers, which are called with `out_sharding`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def heads() -> nnx.LinearGeneral:
            metadata = {"out_sharding": ("fsdp", "tp", None)}
            shape = (HEADS, WIDTH // HEADS)
            options: dict[str, Any] = {"kernel_metadata": metadata, "use_bias": False}
            return nnx.LinearGeneral(WIDTH, shape, rngs=rngs, **options)

        def linear(one: int, other: int, names: P) -> nnx.Linear:
            metadata = {"out_sharding": tuple(names)}
            options: dict[str, Any] = {"kernel_metadata": metadata, "use_bias": False}
            return nnx.Linear(one, other, rngs=rngs, **options)

        self.q, self.k, self.v = heads(), heads(), heads()
        self.o = nnx.Einsum(
            "btnh,nhd->btd",
            (HEADS, WIDTH // HEADS, WIDTH),
            kernel_metadata={"out_sharding": ("tp", None, "fsdp")},
            rngs=rngs,
        )
        self.gate, self.up = linear(WIDTH, HIDDEN, IN), linear(WIDTH, HIDDEN, IN)
        self.down = linear(HIDDEN, WIDTH, OUT)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = normed(x)
        q, k, v = (one(h, out_sharding=HEAD_AXES) for one in (self.q, self.k, self.v))
        x = x + self.o(attention(q, k, v), out_sharding=ACTIVATION)
        h = normed(x)
        gate, up = (one(h, out_sharding=ACTIVATION) for one in (self.gate, self.up))
        return x + self.down(jnp.tanh(gate) * up, out_sharding=ACTIVATION)


class Tied(nnx.Module):
    """As its Qwen3: the model reads the table of an `nnx.Embed` by itself."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedder = nnx.Embed(
            VOCABULARY, WIDTH, embedding_metadata={"out_sharding": (None, "tp")}, rngs=rngs
        )
        self.layers = nnx.List([FlaxLayer(rngs) for _ in range(LAYERS)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedder.embedding[...].at[ids].get(out_sharding=ACTIVATION)
        for layer in self.layers:
            x = layer(x)
        table = self.embedder.embedding[...]
        return jnp.dot(normed(x), table.T, out_sharding=P("fsdp", None, None))


class ShardedLinear(nnx.Module):
    """As in its LLaDA: a class of its own."""

    def __init__(self, one: int, other: int, names: P, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (one, other), out_sharding=names))

    def __call__(self, x: jax.Array, *, out_sharding: P) -> jax.Array:
        return jnp.matmul(x, self.kernel[...], out_sharding=out_sharding)


class ShardedEmbedding(nnx.Embed):
    """As in its LLaDA: a subclass whose call takes `out_sharding`."""

    def __call__(self, inputs: jax.Array, *, out_sharding: P) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.embedding[...].at[inputs].get(out_sharding=out_sharding)


class OwnLayer(nnx.Module):
    """As in its LLaDA."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v, self.o = (ShardedLinear(WIDTH, WIDTH, OUT, rngs) for _ in range(4))
        self.gate, self.up = (ShardedLinear(WIDTH, HIDDEN, IN, rngs) for _ in range(2))
        self.down = ShardedLinear(HIDDEN, WIDTH, OUT, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = normed(x)
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (
            one(h, out_sharding=ACTIVATION).reshape(shape) for one in (self.q, self.k, self.v)
        )
        mixed = attention(q, k, v).reshape(x.shape)
        x = x + self.o(mixed, out_sharding=ACTIVATION)
        h = normed(x)
        gate, up = (one(h, out_sharding=ACTIVATION) for one in (self.gate, self.up))
        return x + self.down(jnp.tanh(gate) * up, out_sharding=ACTIVATION)


class Own(nnx.Module):
    """As its LLaDA: an embedding and a head of their own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wte = ShardedEmbedding(
            VOCABULARY, WIDTH, embedding_metadata={"out_sharding": (None, "tp")}, rngs=rngs
        )
        self.blocks = nnx.List([OwnLayer(rngs) for _ in range(LAYERS)])
        self.ff_out = ShardedLinear(WIDTH, VOCABULARY, IN, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.wte(ids, out_sharding=ACTIVATION)
        for block in self.blocks:
            x = block(x)
        return self.ff_out(normed(x), out_sharding=P("fsdp", None, None))
