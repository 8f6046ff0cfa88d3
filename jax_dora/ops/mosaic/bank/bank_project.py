"""A whole projection of groups of rows, with one adapter per group, in one matrix product.

    y[n] = g[n]∘(x[n] W[layer] + z[n] B[slot[n]]) [+ bias]

    x  [groups, time, in]    W  [layers, in, out]    z  [groups, time, r]    B  [slots, r, out]
    layer  i32[]             slot  i32[groups]
    g  f32[groups, out]      bias  [out] (optional)

x, W, z and B are all bf16 or all fp16; z contains s. base is never stored. B is read from the bank,
and W from the stack of layers, without a copy; XLA's product copies a layer's W out of the stack.
The tiles are those of `project`. A tile's rows all belong to one group, which determines its B.

FLOPs, bytes and the kernel: see `product`, with k₁ = in and k₂ = r.
"""

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper import limits
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.projection import matmul_tiling
from jax_dora.ops.mosaic.projection.matmul import Groups, sum_of_products
from jax_dora.ops.mosaic.projection.matmul_tiling import Config


def refuses(
    groups: int, time: int, in_features: int, out: int, rank: int, dtype: jax.typing.DTypeLike
) -> str | None:
    """Returns why x [groups, time, in], W [in, out] and a bank of maximum rank `rank`, all of
    `dtype`, are not supported, or None."""
    rows = matmul_tiling.config(groups * time, in_features, out, dtype).tile_rows
    if time % rows:
        return f"each row of the batch has {time} tokens, which is not a multiple of {rows}"
    if rank == 0 or rank % limits.ALIGNMENT:
        return f"the bank's maximum rank {rank} is not a positive multiple of {limits.ALIGNMENT}"
    return matmul_tiling.refuses(groups * time, in_features, out, dtype)


def wins(
    groups: int, time: int, in_features: int, out: int, rank: int, dtype: jax.typing.DTypeLike
) -> bool:
    """Returns whether the kernel is expected to be no slower than XLA's product.

    That is assumed of the same sizes as for `project`, which differs only in the addresses of W and
    B. It was measured for prompts of 8 × 512 tokens and the projections of Llama 3 8B (H100,
    `benchmarks bank`).
    """
    return matmul_tiling.wins(groups * time, in_features, out, dtype)


def config(
    groups: int, time: int, in_features: int, out: int, rank: int, dtype: jax.typing.DTypeLike
) -> Config:
    """Returns the fastest config of `project`."""
    return matmul_tiling.config(groups * time, in_features, out, dtype)


@launcher()
def launch(
    x: jax.Array,
    kernel: jax.Array,
    layer: jax.Array,
    z: jax.Array,
    lora_b: jax.Array,
    slot: jax.Array,
    g: jax.Array,
    bias: jax.Array | None = None,
    *,
    config: Config,
    sm_count: int,
) -> jax.Array:
    """Returns y [groups, time, out]."""
    (groups, time, in_features), (rank, out) = x.shape, lora_b.shape[1:]
    vectors = [g] if bias is None else [g, jnp.broadcast_to(bias, (groups, out))]
    z = z.reshape(-1, rank)
    (y,) = sum_of_products(
        (x.reshape(-1, in_features), limits.pad(z, z.shape[0], limits.padded_rank(rank))),
        (kernel, lora_b),
        vectors,
        name="dora_bank_project",
        groups=Groups(time, jnp.append(slot, layer.astype(slot.dtype))),
        config=config,
        sm_count=sm_count,
    )
    return y.reshape(groups, time, out)
