"""The product of groups of rows with the A of each group's slot, z[n] = x[n] A[slot[n]]ᵀ, by
`dora_common.triton.bank_shrink`.

    x  [groups, time, in]  bf16 or fp16     A  [slots, r, in]  x's dtype     slot  i32[groups]
    z  f32[groups, time, r]

A is read from the bank, without a copy. XLA adds the parts' results in a fixed order.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.triton.kernel_call import HALVES, kernel_call

MOST_RANK = 256


def refuses(
    groups: int, time: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike
) -> str | None:
    """Returns why x [groups, time, in] and a bank of maximum rank `rank`, both of `dtype`, are not
    supported, or None."""
    if dtype not in HALVES:
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if 0 in (groups, time, in_features):
        return f"one of groups = {groups}, time = {time}, in = {in_features} is 0"
    if not 0 < rank <= MOST_RANK:
        return f"the bank's maximum rank is {rank}, not 1 to {MOST_RANK}"
    return None


def wins(*call: Any) -> bool:
    """Returns False: on an H200, the kernel was timed beside one of XLA's ways only, in which each
    row has a copy of its adapter (`h200/tried.jsonl`, "Triton kernels beside XLA")."""
    return False


def config(capability: int, *call: Any) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton import bank_shrink

    return bank_shrink.CONFIG


@launcher("capability")
def launch(
    x: jax.Array, lora_a: jax.Array, slot: jax.Array, *, config: Any, capability: int
) -> jax.Array:
    """Returns z f32[groups, time, r]."""
    groups, time, _ = x.shape
    held, rank = lora_a.shape[:2]
    parts = products(x, lora_a, slot, None, None, None, held, config, capability)
    return jnp.sum(parts, axis=0).reshape(groups, time, rank)


def products(
    x: jax.Array,
    lora_a: jax.Array,
    ids: jax.Array,
    grouped: jax.Array | None,
    ranks: jax.Array | None,
    first: jax.Array | None,
    slots: int,
    config: Any,
    capability: int,
) -> jax.Array:
    """Returns parts of x A, f32[parts, batch · time, r], for x [batch, time, in]; the arguments are
    the kernel's."""
    from dora_common.triton import bank_shrink
    from dora_common.triton.jit import cdiv, next_power_of_2

    (batch, time, in_features), rank = x.shape, lora_a.shape[1]
    rows = bank_shrink.tile_rows(time)
    tiles = batch * cdiv(time, rows) if grouped is None else grouped.shape[0]
    splits, chunk = bank_shrink.parts_of(tiles, in_features)
    (parts,) = kernel_call(
        bank_shrink.kernel,
        (tiles, splits),
        capability,
        warps=config.warps,
        stages=config.stages,
        x_ptr=x,
        a_ptr=lora_a,
        ids_ptr=ids,
        groups_ptr=grouped,
        rank_ptr=ranks,
        first_ptr=first,
        parts_ptr=jax.ShapeDtypeStruct((splits, batch * time, rank), jnp.float32),
        batch=batch,
        time=time,
        features=in_features,
        slots=slots,
        CHUNK=chunk,
        RANKS=rank,
        PADDED_RANKS=max(bank_shrink.MIN_ROWS, next_power_of_2(rank)),
        ROWS=rows,
        DEPTH=config.depth,
        GROUPED=grouped is not None,
        AT_END=True,
    )
    return parts
