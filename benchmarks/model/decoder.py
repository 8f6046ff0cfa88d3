"""A decoder of Qwen3's kind as a user of Flax writes it: nothing in it knows of adapters.

Of jax_dora it calls `remat_policy` and, where `fused_swiglu` is set, `swiglu`. It is not
`jax_dora.models`: `against` runs it with the packages of checkouts that have no models, of which
LoRA's program must be the same in both, and `scale` lays it out along explicit axes.
"""

from __future__ import annotations

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
      attention: as `jax.nn.dot_product_attention`'s `implementation`.
      rows: the sharding of what goes into projections, or None where XLA finds one.
      residual: that of what layers add to, which explicit axes ask for; None on automatic ones.
    """

    dtype: Any = jnp.bfloat16
    linear: Callable[..., Any] = nnx.Linear
    attention: Any = "xla"
    fused_swiglu: bool = True
    rows: Any = None
    residual: Any = None

    def place(self, x: jax.Array) -> jax.Array:
        return x if self.rows is None else lax.with_sharding_constraint(x, self.rows)

    def make(self, n_in: int, n_out: int, rngs: nnx.Rngs, plain: bool = False) -> Any:
        options = {"dtype": self.dtype, "param_dtype": self.dtype, "kernel_init": INIT}
        kind = nnx.Linear if plain else self.linear
        return kind(n_in, n_out, use_bias=False, rngs=rngs, **options)

    def norm(self, features: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
        options = {"dtype": self.dtype, "param_dtype": self.dtype}
        return nnx.RMSNorm(features, epsilon=NORM_EPSILON, rngs=rngs, **options)


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

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
            setattr(self, name, style.make(n_in, n_out, rngs))
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
        if self.style.fused_swiglu:
            hidden = jax_dora.swiglu(self.gate_proj, self.up_proj, x)
        else:
            hidden = self.style.place(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(hidden, out_sharding=self.style.residual)


class Decoder(nnx.Module):
    """Embedding, a scan over rematerialised layers, and the head."""

    def __init__(self, sizes: Protocol, style: Style, rngs: nnx.Rngs) -> None:
        def make(key: jax.Array) -> Layer:
            return Layer(sizes, style, nnx.Rngs(key))

        keys = jax.random.split(rngs.params(), sizes.layers)
        graphdef = nnx.graphdef(nnx.eval_shape(make, keys[0]))
        # One layer after the other: together their random numbers would take the memory twice.
        self.layers = nnx.merge(graphdef, lax.map(lambda key: nnx.state(make(key)), keys))
        options = {"dtype": style.dtype, "param_dtype": style.dtype, "embedding_init": INIT}
        self.embed = nnx.Embed(sizes.vocabulary, sizes.hidden, rngs=rngs, **options)
        self.norm = style.norm(sizes.hidden, rngs)
        self.head = style.make(sizes.hidden, sizes.vocabulary, rngs, plain=True)
        self.style = style

    def __call__(self, tokens: jax.Array, last: int) -> jax.Array:
        """Returns the logits of the `last` tokens of each row."""
        graphdef, stacked = nnx.split(self.layers)
        policy = jax_dora.remat_policy()

        def one_layer(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, state)(x), None

        one_layer = jax.checkpoint(one_layer, policy=policy, prevent_cse=False)
        embedded = self.embed(tokens, out_sharding=self.style.residual)
        x, _ = lax.scan(one_layer, embedded, stacked)
        return self.head(self.norm(x[:, -last:]))


def loss(model: Decoder, tokens: jax.Array, last: int) -> jax.Array:
    """Returns the mean cross-entropy of the last tokens of each row."""
    logits = model(tokens[:, :-1], last).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -last:])
    return each.mean()


def gradient(graphdef: Any, loss: Loss, trained: Any, frozen: Any, *data: Any) -> tuple[Any, Any]:
    """Returns the loss of `data`, and gradients like `trained`."""

    def of_adapters(trained: Any) -> jax.Array:
        # Dropout counts its draws in what is merged.
        return loss(nnx.merge(graphdef, trained, frozen, copy=True), *data)

    return jax.value_and_grad(of_adapters)(trained)


def update(graphdef: Any, loss: Loss, trained: Any, frozen: Any, state: Any, *data: Any) -> Any:
    """Returns the loss of `data` before an optimizer step, and the adapters and the optimizer's
    state after it."""
    value, gradients = gradient(graphdef, loss, trained, frozen, *data)
    updates, state = OPTIMIZER.update(gradients, state, trained)
    return value, optax.apply_updates(trained, updates), state


def rotate(x: jax.Array) -> jax.Array:
    """Returns x [batch, time, heads, head_dim] with rotary positions (arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    frequencies = ROPE_THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
