"""A decoder of Qwen3's kind as a user of Flax writes it: nothing in it knows of adapters.

Of jax_dora it calls `remat_policy` and, where `fused_swiglu` is set, `swiglu`.
"""

from __future__ import annotations

import functools
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


class Style(NamedTuple):
    """How a decoder computes.

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


def rotate(x: jax.Array) -> jax.Array:
    """Returns x [batch, time, heads, head_dim] with rotary positions (arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    frequencies = ROPE_THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


class LoRALinear(nnx.Linear):
    """y = x W + s·(x A) B (arXiv 2106.09685)."""

    def __init__(self, *sizes: int, rank: int, scale: float, b_init: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        make, key, dtype = nnx.initializers.lecun_normal(), options["rngs"].params, self.param_dtype
        self.lora_a = nnx.LoRAParam(make(key(), (sizes[0], rank), dtype))
        self.lora_b = nnx.LoRAParam(b_init(key(), (rank, sizes[1]), dtype))
        self.scale = scale

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        dot = functools.partial(jnp.matmul, out_sharding=out_sharding)
        added = dot(dot(inputs, self.lora_a[...]), self.lora_b[...])
        base = super().__call__(inputs, out_sharding=out_sharding)
        return base + added * jnp.asarray(self.scale, added.dtype)


class Dense(LoRALinear):
    """The reference: W' is formed, and the gradient left to autodiff; no formula of the package."""

    def __init__(self, *sizes: int, dora: bool, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.magnitude = nnx.LoRAParam(jnp.ones(sizes[1])) if dora else None

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        direction = self.kernel[...] + self.scale * (self.lora_a[...] @ self.lora_b[...])
        if self.magnitude is not None:
            norm = lax.stop_gradient(jnp.linalg.norm(direction, axis=0))
            direction = direction * (self.magnitude[...] / jnp.maximum(norm, 1e-6))[None, :]
        return inputs @ direction
