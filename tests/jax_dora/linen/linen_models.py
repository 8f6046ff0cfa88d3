"""Linen modules as people write them without the library, whose own code reads their parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from jax_dora.linen import join_adapters, merge_dora, split_adapters

WIDTH, HIDDEN, LAYERS, EXPERTS, VOCABULARY = 6, 5, 2, 3, 11
normal = nn.initializers.normal(0.5)


class Einsum(nn.Module):
    """As in gemma: the equation comes with the call."""

    shape: tuple[int, ...]
    weight_name: str = "w"

    @nn.compact
    def __call__(self, equation: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, self.param(self.weight_name, normal, self.shape))


class Embedder(nn.Module):
    """As in gemma: a table that is also the output head, made in setup."""

    def setup(self) -> None:
        self.table = self.param("input_embedding", normal, (VOCABULARY, WIDTH))

    def encode(self, ids: jax.Array) -> jax.Array:
        return self.table[(ids,)]

    def decode(self, x: jax.Array) -> jax.Array:
        return jnp.dot(x, self.table.T)


class Gated(nn.Module):
    """As in gemma: two modules that share the scope of a third."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gating = Einsum((2, WIDTH, HIDDEN), "gating_einsum")
        nn.share_scope(self, gating)
        gate = gating("...F,NFH->...NH", x)
        linear = Einsum((HIDDEN, WIDTH), "linear")
        nn.share_scope(self, linear)
        return linear("...H,HF->...F", jnp.tanh(gate[..., 0, :]) * gate[..., 1, :])


class DenseGeneral(nn.Module):
    """As in MaxText: a class of its own by a known name, with logical axes."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    contracted: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(normal, self.names)
        kernel = jnp.asarray(self.param("kernel", init, self.shape), x.dtype)
        axes = tuple(range(x.ndim - self.contracted, x.ndim))
        return lax.dot_general(x, kernel, ((axes, tuple(range(self.contracted))), ((), ())))


class Layer(nn.Module):
    """One of a stack."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        heads = DenseGeneral((WIDTH, 2, 4), ("embed", "heads", "kv"), 1, name="heads")(x)
        out = DenseGeneral((2, 4, WIDTH), ("heads", "kv", "embed"), 2, name="out")
        return x + out(jnp.tanh(heads)), None


class Experts(nn.Module):
    """Packed experts, in an einsum over all of them and in a ragged product."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, WIDTH)
        up = jnp.einsum("td,edf->etf", rows, self.param("up", normal, (EXPERTS, WIDTH, HIDDEN)))
        down = self.param("down", normal, (EXPERTS, HIDDEN, WIDTH))
        sizes = jnp.full(EXPERTS, rows.shape[0])
        y = lax.ragged_dot(jnp.tanh(up).reshape(-1, HIDDEN), down, sizes)
        return y.reshape(EXPERTS, *x.shape).sum(0)


class Model(nn.Module):
    """All of them: scanned along axis 1, rematerialised, jitted, with a plain layer and a weight
    that no product reads."""

    def setup(self) -> None:
        self.embedder = Embedder()
        self.layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 1},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )()
        self.mlp = Gated()
        self.experts = Experts()
        self.plain = nn.Dense(WIDTH)
        self.odd = self.param("odd", normal, (WIDTH, WIDTH))
        self.norm = nn.LayerNorm()

    @functools.partial(nn.jit, static_argnames=("self",))
    def __call__(self, ids: jax.Array) -> jax.Array:
        x, _ = self.layers(self.embedder.encode(ids), None)
        x = x + self.mlp(x)
        x = x + self.experts(x) + x @ jnp.abs(self.odd)
        return self.embedder.decode(self.plain(self.norm(x)))

    def encode(self, ids: jax.Array) -> jax.Array:
        return self.mlp(self.embedder.encode(ids))


def scanned(layer, axis, length):
    """A class of `length` layers whose parameters are stacked along an axis."""
    options = {"variable_axes": {"params": axis}, "split_rngs": {"params": True}}
    return nn.scan(layer, length=length, **options)


def train(variables):
    """Variables with every number of their adapters away from its start."""
    adapters, rest = split_adapters(variables["params"])
    leaves, structure = jax.tree.flatten(adapters)
    rng = np.random.default_rng(0)
    noise = [rng.standard_normal(leaf.shape, np.float32) / 9 for leaf in leaves]
    pairs = zip(leaves, noise, strict=True)
    leaves = [jnp.asarray(np.asarray(leaf) * (1 + n) + n, leaf.dtype) for leaf, n in pairs]
    return {"params": join_adapters(jax.tree.unflatten(structure, leaves), rest)}


def adapted_and_merged(model, adapted, variables, *args, **options):
    """(the result of the adapted model with a trained adapter, and of the merged one)."""
    variables = train(variables)
    merged = merge_dora(adapted, variables, *args, **options)
    with jax.default_matmul_precision("highest"):
        found = adapted.apply(variables, *args, **options)
        return found, model.apply(merged, *args, **options)
