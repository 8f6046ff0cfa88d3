"""The gradient of a projection with respect to x in one matrix product: dx = d Wᵀ + dz Aᵀ.

    d  [rows, out]   W  [in, out]   dz  [rows, r]   A  [in, r]   dx  [rows, in]   all bf16 or fp16

d = g∘dy and dz = d Bᵀ; A contains s.

FLOPs, bytes and the kernel: see `product`, with k₁ = out and k₂ = r.
"""

import jax

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import pad, padded_rank
from jax_dora.ops.mosaic.projection.matmul import sum_of_products
from jax_dora.ops.mosaic.projection.matmul_tiling import Config
from jax_dora.ops.mosaic.projection.matmul_tiling import config as config_of
from jax_dora.ops.mosaic.projection.matmul_tiling import refuses as refuses
from jax_dora.ops.mosaic.projection.matmul_tiling import wins as wins


def config(rows: int, in_features: int, out: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the config for a gradient [rows, in]."""
    return config_of(rows, out, in_features, dtype)


@launcher()
def launch(
    d: jax.Array,
    kernel: jax.Array,
    dz: jax.Array,
    lora_a: jax.Array,
    *,
    config: Config,
    sm_count: int,
) -> jax.Array:
    """Returns dx [..., in] for d [..., out] and dz [..., r]."""
    shape = (*d.shape[:-1], kernel.shape[0])
    d, dz = d.reshape(-1, d.shape[-1]), dz.reshape(-1, dz.shape[-1])
    rank = padded_rank(dz.shape[1])
    dz, lora_a = pad(dz, dz.shape[0], rank), pad(lora_a, lora_a.shape[0], rank)
    (dx,) = sum_of_products(
        (d, dz),
        (kernel, lora_a),
        [],
        name="dora_project_back",
        transposed=True,
        config=config,
        sm_count=sm_count,
    )
    return dx.reshape(shape)
