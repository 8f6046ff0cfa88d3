"""The adapter's first product, z = x A, in a time that XLA's scheduler knows.

    x  [rows, in]   A  [in, r]   z  [rows, r]     all bf16 or all fp16

If there are fewer tiles than multiprocessors, XLA's own product divides `in`, and its scheduler
takes the divided product for more than 50 times as long as it is. It then expects the product to
hide the gathering of a kernel (`h200x2/tried.jsonl`).

FLOPs, bytes and the kernel: see `product`, with k₁ = in and no k₂.
"""

import jax
from jax.experimental import pallas as pl

from jax_dora.ops.dispatch.choose import HOPPER_SM_COUNT
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.projection.matmul import sum_of_products
from jax_dora.ops.mosaic.projection.matmul_tiling import Config
from jax_dora.ops.mosaic.projection.matmul_tiling import refuses as refuses

TILE = 128
# With fewer tiles, too many multiprocessors have none; with more, XLA does not divide `in`.
FEWEST_TILES, MOST_TILES = 2 * HOPPER_SM_COUNT // 3, HOPPER_SM_COUNT


def wins(rows: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether a step with gathered kernels is faster with this kernel, as measured with
    4096 rows at rank 384: 96 tiles (H200, c6113aa, `benchmarks scale`)."""
    return FEWEST_TILES <= pl.cdiv(rows, TILE) * pl.cdiv(rank, TILE) <= MOST_TILES


def config(rows: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the config, with small tiles: z has few columns."""
    return Config(tile_rows=TILE, tile_cols=TILE, stages=6)


@launcher()
def launch(x: jax.Array, lora_a: jax.Array, *, config: Config, sm_count: int) -> jax.Array:
    """Returns z [..., r] for x [..., in]."""
    rows = x.reshape(-1, x.shape[-1])
    (z,) = sum_of_products(
        (rows,), (lora_a,), [], name="dora_shrink", config=config, sm_count=sm_count
    )
    return z.reshape(*x.shape[:-1], lora_a.shape[1])
