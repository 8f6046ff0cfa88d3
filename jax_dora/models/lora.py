"""Plain LoRA beside DoRA, for comparison: the same adapters without norm and magnitude."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from dora_common.hyperparameters import adapter_scale
from jax_dora.layers.base import default_lora_a_init, default_lora_b_init


class LoRALinear(nnx.Linear):
    """y = x kernel + s·(x lora_a) lora_b + bias (arXiv 2106.09685).

    Arguments and attributes as `jax_dora.DoRALinear`'s, of which it has those that LoRA knows.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float,
        use_rslora: bool = False,
        adapter_dtype: Dtype = jnp.float32,
        lora_a_init: Initializer = default_lora_a_init,
        lora_b_init: Initializer = default_lora_b_init,
        rngs: nnx.Rngs,
        **linear: Any,
    ) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **linear)
        self.scale = adapter_scale(rank, alpha, use_rslora)
        a = lora_a_init(rngs.params(), (in_features, rank), adapter_dtype)
        b = lora_b_init(rngs.params(), (rank, out_features), adapter_dtype)
        self.lora_a, self.lora_b = nnx.LoRAParam(a), nnx.LoRAParam(b)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        base = super().__call__(inputs, out_sharding)
        dtype = base.dtype
        a, b = self.lora_a[...].astype(dtype), self.lora_b[...].astype(dtype)
        return base + (inputs.astype(dtype) @ a @ b) * jnp.asarray(self.scale, dtype)
