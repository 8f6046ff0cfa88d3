"""A whole projection in one matrix product: y = g∘(x W + z B) [+ bias].

    x  [rows, in]   W  [in, out]   z  [rows, r]   B  [r, out]     all bf16 or all fp16
    g  f32[out]     bias  [out] (optional)        inner = x W + z B  [rows, out]  (optional)

z contains s. base = x W is never stored. inner stays in fp32 until y is rounded, so y does not lose
precision by cancellation in g - 1.

FLOPs, bytes and the kernel: see `product`, with k₁ = in and k₂ = r.
"""

import jax

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import pad, padded_rank
from jax_dora.ops.mosaic.projection.matmul import sum_of_products
from jax_dora.ops.mosaic.projection.matmul_tiling import Config
from jax_dora.ops.mosaic.projection.matmul_tiling import config as config
from jax_dora.ops.mosaic.projection.matmul_tiling import refuses as refuses
from jax_dora.ops.mosaic.projection.matmul_tiling import wins as wins


@launcher("want_inner")
def launch(
    x: jax.Array,
    kernel: jax.Array,
    z: jax.Array,
    lora_b: jax.Array,
    g: jax.Array | None,
    bias: jax.Array | None = None,
    *,
    want_inner: bool,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, inner or None) for x [..., in] and z [..., r].

    If g is None, y is inner, and bias must be None.
    """
    vectors = [vector for vector in (g, bias) if vector is not None]
    shape = (*x.shape[:-1], kernel.shape[1])
    x, z = x.reshape(-1, x.shape[-1]), z.reshape(-1, z.shape[-1])
    rank = padded_rank(z.shape[1])
    z, lora_b = pad(z, z.shape[0], rank), pad(lora_b, rank, lora_b.shape[1])
    y, *inner = sum_of_products(
        (x, z),
        (kernel, lora_b),
        vectors,
        name="dora_project",
        outputs=2 if want_inner else 1,
        config=config,
        sm_count=sm_count,
    )
    return y.reshape(shape), inner[0].reshape(shape) if want_inner else None
