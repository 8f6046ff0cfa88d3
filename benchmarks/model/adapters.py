"""Projections with LoRA and with DoRA, for the decoders that are compared."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_dora
from benchmarks.model.protocol import LORA_B_DEVIATION, PROJECTIONS, Protocol
from jax_dora.ops.row_scaled import plain

LORA_B_INIT = nnx.initializers.normal(LORA_B_DEVIATION)


class LoRALinear(nnx.Linear):
    """y = x W + s·(x A) B (arXiv 2106.09685)."""

    can_take_codes = True

    def __init__(self, *sizes: int, rank: int, scale: float, **options: Any) -> None:
        super().__init__(*sizes, **options)
        make, key, dtype = nnx.initializers.lecun_normal(), options["rngs"].params, self.param_dtype
        self.lora_a = nnx.LoRAParam(make(key(), (sizes[0], rank), dtype))
        self.lora_b = nnx.LoRAParam(LORA_B_INIT(key(), (rank, sizes[1]), dtype))
        self.scale = scale

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        dot = functools.partial(jnp.matmul, out_sharding=out_sharding)
        added = dot(dot(plain(inputs), self.lora_a[...]), self.lora_b[...])
        base = super().__call__(inputs, out_sharding=out_sharding)
        return base + added * jnp.asarray(self.scale, added.dtype)


def linear_of(kind: str, rank: int, **options: Any) -> Callable[..., Any]:
    """Returns a function that makes a projection with a scale of 2, called like `nnx.Linear`.

    Args:
      kind: "LoRA" or "DoRA".
      options: further options of the class.
    """
    if kind == "DoRA":
        options = {"adapter_dtype": jnp.bfloat16, "lora_b_init": LORA_B_INIT} | options
        return functools.partial(jax_dora.DoRALinear, rank=rank, alpha=2 * rank, **options)
    return functools.partial(LoRALinear, rank=rank, scale=2.0, **options)


def dora_rule(
    sizes: Protocol, keep_inner: bool | None = None, implementation: str | None = None
) -> jax_dora.DoRARule:
    """Returns the rule for DoRA on the projections of a decoder."""
    return jax_dora.DoRARule(
        rf"layers/(\d+/)?({'|'.join(PROJECTIONS)})",
        sizes.rank,
        sizes.alpha,
        use_rslora=True,
        keep_inner=keep_inner,
        implementation=implementation,
        adapter_dtype=jnp.bfloat16,
        lora_b_init=LORA_B_INIT,
    )
