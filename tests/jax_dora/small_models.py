"""Small nnx models of every shape that adapting has to find its way through."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dora import DoRARule

WIDTH, VOCABULARY, LAYERS = 8, 13, 3


class Mixed(nnx.Module):
    """Every layer that can be adapted, some in containers, one shared, and some that cannot be."""

    def __init__(self, rngs: nnx.Rngs, dtype=jnp.float32) -> None:
        options = {"param_dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(VOCABULARY, WIDTH, **options)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), feature_group_count=2, **options)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, **options)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, **options)])
        self.named = nnx.Dict(gate=nnx.Einsum("...d,df->...f", (WIDTH, WIDTH), **options))
        self.pairs = nnx.data([{"one": nnx.Linear(WIDTH, WIDTH, use_bias=False, **options)}])
        self.norm = nnx.LayerNorm(WIDTH, **options)
        self.again = self.blocks[0]

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.conv(self.embed(ids))
        x = x + self.attention(self.norm(x))
        x = nnx.relu(self.blocks[0](x)) + self.again(x)
        return self.pairs[0]["one"](x * self.named["gate"](x))


class Block(nnx.Module):
    """What `Stacked` stacks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.heads = nnx.LinearGeneral(WIDTH, (2, WIDTH // 2), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nnx.tanh(self.linear(x))
        return x + self.heads(x).reshape(x.shape)


class Stacked(nnx.Module):
    """Layers made by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block, x):
            return block(x)

        return run(self.blocks, x)


class Chain(nnx.Module):
    """So many layers that "blocks/10" stands before "blocks/2" in the order of the alphabet."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(12)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + nnx.tanh(block(x))
        return x


# Of one shape, each with a scale of its own.
UNLIKE = [DoRARule(f"blocks/{index}", 2, 1 + index) for index in range(12)]

ALL = [
    DoRARule("conv", 2, 4.0),
    DoRARule("embed|attention/.*|blocks/0|named/gate|pairs/0/one", 3, 4.0),
]


def ids() -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).integers(0, VOCABULARY, (2, 5)), jnp.int32)


def call(model: nnx.Module, *inputs: jax.Array) -> jax.Array:
    """The result of a compiled call that does not touch the model (nnx.jit renews its arrays)."""
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state, *inputs: nnx.merge(graphdef, state)(*inputs))(state, *inputs)


def train(model: nnx.Module, seed: int = 0) -> nnx.Module:
    """`model`, changed in place: every adapter away from its start, by a few per cent."""
    rng = np.random.default_rng(seed)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.LoRAParam):
            noise = rng.standard_normal(variable.shape, np.float32) / 20
            value = np.asarray(variable.get_value(), np.float32)
            variable.set_value(jnp.asarray(value * (1 + noise) + noise, variable.dtype))
    return model


def identical(one: nnx.Module, other: nnx.Module) -> bool:
    """The same structure, over the very same arrays."""
    leaves = (jax.tree.leaves(nnx.state(model, nnx.Param)) for model in (one, other))
    same = all(a is b for a, b in zip(*leaves, strict=True))
    return same and nnx.graphdef(one) == nnx.graphdef(other)
