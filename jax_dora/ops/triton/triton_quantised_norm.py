"""The norm's square in one pass over a quantised kernel: ‖σ∘v(q) + s·A B‖² per output feature, by
`dora_common.triton.strip_norm`.

    q  [in, out]  int8, float8_e4m3fn, int4, or uint4 of NF4     σ  [in / t, out / u]
    A  [in, r], B  [r, out]  bf16, fp16 or fp32                  s  f32[]

The accuracy of fp32 adapters is that of `dora_common.triton.adapter_pieces`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.quantised import Format, repeated
from jax_dora.ops.triton.kernel_call import HALVES
from jax_dora.ops.triton.triton_codes import arguments
from jax_dora.ops.triton.triton_norm import squares

# Narrower groups of rows that share a scale would take a load for few elements.
LEAST_GROUP = 8
MOST_RANK = 128


def refuses(in_features: int, rank: int, out: int, form: Format, adapter_dtype: Any) -> str | None:
    """Returns why the kernel does not support q [in, out] of a format and A, B of `rank`, or
    None."""
    if form.has_zero_point:
        return f"the kernel's format is {form} with zero points"
    if adapter_dtype not in (*HALVES, jnp.float32):
        return f"the adapter has dtype {adapter_dtype}, none of bfloat16, float16, float32"
    if 0 in (in_features, rank, out):
        return f"one of in = {in_features}, rank = {rank}, out = {out} is 0"
    most = MOST_RANK // 2 if adapter_dtype == jnp.float32 else MOST_RANK
    if rank > most:
        return f"the adapter's rank is {rank}, above {most}: a strip of B does not fit"
    if form.tile[0] % LEAST_GROUP:
        return f"the kernel's format is {form}; a tile needs a multiple of {LEAST_GROUP} rows"
    if out % form.packed:
        return f"out = {out} is odd, and two codes share a byte"
    return None


def wins(in_features: int, rank: int, out: int, form: Format, adapter_dtype: Any) -> bool:
    """Returns False: on an H200, the kernel was slower than XLA (NF4, 8192 × 8192 at rank 64:
    499 µs, and XLA 358)."""
    return False


def config(
    capability: int, in_features: int, rank: int, out: int, form: Format, adapter_dtype: Any
) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton import strip_norm

    return strip_norm.config(rank, is_coded=True, out_last=True)


@launcher("capability")
def launch(
    qvalue: jax.Array,
    scales: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: jax.Array,
    *,
    config: Any,
    capability: int,
) -> jax.Array:
    """Returns norm² f32[out]."""
    weight = arguments(qvalue, repeated(scales, 1, qvalue.shape[1]))
    weight["GROUP"] = math.gcd(weight["RUN"], config.width)
    return squares(weight, lora_a, lora_b, scale, config, capability)
