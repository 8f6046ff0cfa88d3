"""The adapter's first product, for XLA's scheduler: z = x A.

    x  [rows, in]   A  [in, r]   z  [rows, r]     all bf16 or all fp16

XLA's own product is as fast. But where XLA divides `in` among more tiles, its scheduler takes the
product for up to 50 times as long as it is, and then expects it to hide the gathering of a kernel.

FLOPs, bytes and the kernel: see `product`, with k₁ = in and no k₂.
"""

import jax

from jax_dora.ops.mosaic.launch import launcher
from jax_dora.ops.mosaic.product import two_part_product
from jax_dora.ops.mosaic.product_tiling import Config
from jax_dora.ops.mosaic.product_tiling import refuses as refuses

# From this rank on the kernel's tiles occupy the GPU without dividing `in`.
LEAST_ROWS, LEAST_RANK = 2048, 256


def wins(rows: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether a step in which kernels are gathered was faster with the kernel."""
    return rows >= LEAST_ROWS and rank >= LEAST_RANK


def config(rows: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the config, with small tiles: z has few columns."""
    return Config(tile_rows=128, tile_cols=128, stages=6)


@launcher()
def launch(x: jax.Array, lora_a: jax.Array, *, config: Config, sm_count: int) -> jax.Array:
    """Returns z [..., r] for x [..., in]."""
    rows = x.reshape(-1, x.shape[-1])
    (z,) = two_part_product((rows,), (lora_a,), [], config=config, sm_count=sm_count)
    return z.reshape(*x.shape[:-1], lora_a.shape[1])
