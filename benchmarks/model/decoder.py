"""A decoder like Qwen3, written as a user of Flax would: no part of it depends on adapters.

It calls `jax_dora.remat_policy`. It is not a decoder of `jax_dora.lm.models`, because `scale` runs
it on explicit mesh axes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

import jax_dora
from benchmarks.model.protocol import Protocol

INIT = nnx.initializers.normal(0.02)
ROPE_THETA = 1_000_000.0
NORM_EPSILON = 1e-6
OPTIMIZER = optax.adamw(1e-4)
Loss = Callable[..., jax.Array]


class Style(NamedTuple):
    """The implementations and shardings that a decoder computes with.

    Attributes:
      linear: makes the seven projections of a layer; called like `nnx.Linear`.
      attention: the `implementation` of `jax.nn.dot_product_attention`.
      rows: the sharding of the inputs of projections; None to leave it to XLA.
      residual: the sharding of the residual stream on explicit axes; None on automatic axes.
      scanned: whether the layers are one stack in a scan. Otherwise they are a list in a loop, as
        most users of Flax write it.
    """

    dtype: Any = jnp.bfloat16
    linear: Callable[..., Any] = nnx.Linear
    attention: Any = "xla"
    rows: Any = None
    residual: Any = None
    scanned: bool = True

    def place(self, x: jax.Array) -> jax.Array:
        return x if self.rows is None else lax.with_sharding_constraint(x, self.rows)

    def projection(self, make: Callable[..., Any], *sizes: int, rngs: nnx.Rngs) -> Any:
        options = {"dtype": self.dtype, "param_dtype": self.dtype, "kernel_init": INIT}
        return make(*sizes, use_bias=False, rngs=rngs, **options)

    def norm(self, features: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
        options = {"dtype": self.dtype, "param_dtype": self.dtype}
        return nnx.RMSNorm(features, epsilon=NORM_EPSILON, rngs=rngs, **options)


class Layer(nnx.Module):
    """Attention and an MLP, each with a norm before it and a residual connection around it."""

    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def __init__(self, sizes: Protocol, style: Style, rngs: nnx.Rngs) -> None:
        self.attention_norm = style.norm(sizes.hidden, rngs)
        self.mlp_norm = style.norm(sizes.hidden, rngs)
        self.q_norm = style.norm(sizes.head_dim, rngs)
        self.k_norm = style.norm(sizes.head_dim, rngs)
        for name, (n_in, n_out) in sizes.projections().items():
            setattr(self, name, style.projection(style.linear, n_in, n_out, rngs=rngs))
        self.head_dim, self.style = sizes.head_dim, style

    def __call__(self, x: jax.Array) -> jax.Array:
        place = self.style.place
        x = x + self.attend(place(self.attention_norm(x)))
        return x + self.mlp(place(self.mlp_norm(x)))

    def attend(self, x: jax.Array) -> jax.Array:
        per_head = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (p(x).reshape(per_head) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q)), rotate(self.k_norm(k))
        implementation = self.style.attention
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        y = self.style.place(y.reshape(*x.shape[:2], -1))
        return self.o_proj(y, out_sharding=self.style.residual)

    def mlp(self, x: jax.Array) -> jax.Array:
        hidden = self.style.place(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(hidden, out_sharding=self.style.residual)


class Decoder(nnx.Module):
    """An embedding, rematerialised layers, and a head."""

    layers: Any

    def __init__(self, sizes: Protocol, style: Style, rngs: nnx.Rngs) -> None:
        def make(key: jax.Array) -> Layer:
            return Layer(sizes, style, nnx.Rngs(key))

        keys = jax.random.split(rngs.params(), sizes.layers)
        if style.scanned:
            graphdef = nnx.graphdef(nnx.eval_shape(make, keys[0]))
            # Layers are drawn one after another: drawing all at once would need twice the memory.
            self.layers = nnx.merge(graphdef, lax.map(lambda key: nnx.state(make(key)), keys))
        else:
            self.layers = nnx.List(map(make, keys))
        options = {"dtype": style.dtype, "param_dtype": style.dtype, "embedding_init": INIT}
        self.embed = nnx.Embed(sizes.vocabulary, sizes.hidden, rngs=rngs, **options)
        self.norm = style.norm(sizes.hidden, rngs)
        self.head = style.projection(nnx.Linear, sizes.hidden, sizes.vocabulary, rngs=rngs)
        self.style = style

    def __call__(self, tokens: jax.Array, last: int) -> jax.Array:
        """Returns the logits of the `last` tokens of each row."""
        x = self.embed(tokens, out_sharding=self.style.residual)
        x = self.scan(x) if self.style.scanned else self.loop(x)
        return self.head(self.norm(x[:, -last:]))

    def loop(self, x: jax.Array) -> jax.Array:
        call = nnx.remat(Layer.__call__, policy=jax_dora.remat_policy())
        for layer in self.layers:
            x = call(layer, x)
        return x

    def scan(self, x: jax.Array) -> jax.Array:
        graphdef, stacked = nnx.split(self.layers)
        policy = jax_dora.remat_policy()

        def one_layer(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, state)(x), None

        one_layer = jax.checkpoint(one_layer, policy=policy, prevent_cse=False)
        return lax.scan(one_layer, x, stacked)[0]


def loss(model: Decoder, tokens: jax.Array, last: int) -> jax.Array:
    """Returns the mean cross-entropy of the last tokens of each row."""
    logits = model(tokens[:, :-1], last).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -last:])
    return each.mean()


def update(graphdef: Any, loss: Loss, trained: Any, frozen: Any, state: Any, *data: Any) -> Any:
    """Returns the loss of `data` before an optimizer step, and the adapters and the optimizer state
    after it."""

    def adapter_loss(trained: Any) -> jax.Array:
        # A copy, because dropout counts its draws in the merged model.
        return loss(nnx.merge(graphdef, trained, frozen, copy=True), *data)

    value, gradients = jax.value_and_grad(adapter_loss)(trained)
    updates, state = OPTIMIZER.update(gradients, state, trained)
    return value, optax.apply_updates(trained, updates), state


def rotate(x: jax.Array) -> jax.Array:
    """Returns x [batch, time, heads, head_dim] with rotary positions (arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    frequencies = ROPE_THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
