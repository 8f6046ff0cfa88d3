"""Adapts one pretrained projection. A new DoRA layer computes the same as its base layer."""

import jax
from flax import nnx

import jax_dora

pretrained = nnx.Linear(512, 256, rngs=nnx.Rngs(0))
layer = jax_dora.DoRALinear.from_linear(pretrained, rank=16, alpha=32, rngs=nnx.Rngs(1))
x = jax.random.normal(jax.random.key(2), (4, 512))
print("the new layer equals its base:", bool((layer(x) == pretrained(x)).all()))
print("trainable:", {name: p.shape for name, p in nnx.state(layer, nnx.LoRAParam).items()})
