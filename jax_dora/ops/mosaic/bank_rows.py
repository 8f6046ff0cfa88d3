"""Rows of one token each, every one with the adapter of its slot: y[n] = (x[n] A[slot]) B[slot].

    x  [rows, in]   bf16 or fp16, 1 to 256 rows     rank  i32[slots]
    A  [slots, r, in]   x's dtype     B  [slots, r, out]  likewise; r ranks have room
    y  [rows, out]      x's dtype, zeros in a row without a slot

Two kernels, `bank_rows_shrink` and `bank_rows_expand`, for all projections of the same x at once;
between them XLA adds up the parts of x A, in a fixed order. Nothing of it waits for the base's
product, beside which the kernels may run; what follows both is XLA's to fuse. Each thread block has
a strip of 64 columns of A or B and goes through the slots that rows have, each once, by the real
rank (in steps of 16, 32, 64): tensor cores multiply 64 rows an instruction, those of other slots
being zeros, and add up. Nothing is sorted or copied, and what a row gets does not depend on its
company.

Bytes: A and B of the slots in use, once, and y; the floor is bytes / copy rate. FLOPs:
2 · 64⌈rows / 64⌉ · r · (in + out) for every slot in use.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_dora.ops.mosaic import bank_rows_expand, bank_rows_shrink, hopper
from jax_dora.ops.mosaic.bank_rows_sizes import (
    Config,
    Member,
    Sizes,
    call_of,
    config_of,
    padded,
)
from jax_dora.ops.mosaic.hopper import TILE_K
from jax_dora.ops.mosaic.launch import launcher

MOST_ROWS = 256
MOST_RANK = 128


def refuses(
    rows: int, in_features: int, out: int, slots: int, rank: int, dtype: DTypeLike, held: DTypeLike
) -> str | None:
    """Returns why x [rows, in] of `dtype` and a bank of `slots` with room for `rank` ranks, its
    matrices of dtype `held`, are not taken, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if held != dtype:
        return f"x has dtype {jnp.dtype(dtype)}, and the bank {jnp.dtype(held)}"
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    for name, size in (("in", in_features), ("out", out)):
        if size == 0 or size % TILE_K:
            return f"{name} = {size} is not a multiple of {TILE_K}"
    if rank % hopper.ALIGNMENT or not 0 < rank <= MOST_RANK:
        return f"the bank has room for rank {rank}, no multiple of 8 up to {MOST_RANK}"
    if config_of(Sizes(rows, in_features, slots, rank), out) is None:
        return f"shared memory has no room for {rows} rows of {slots} slots of rank {rank}"
    return None


def wins(
    rows: int, in_features: int, out: int, slots: int, rank: int, dtype: DTypeLike, held: DTypeLike
) -> bool:
    """Returns whether the kernels were faster than every way of XLA's (`benchmarks bank`: the
    projections of a layer of Llama 3 8B's dimensions, 64 slots)."""
    return rows > 8 and min(in_features, out) >= 1024


def config(
    rows: int,
    in_features: int,
    out: int,
    slots: int,
    rank: int,
    dtype: DTypeLike,
    held: DTypeLike,
    members: int = 1,
) -> Config:
    """Returns the launch knobs for a call that is not refused, or for one of several members, none
    of which is; then `out` is the sum of theirs."""
    found = config_of(Sizes(rows, in_features, slots, rank), out, members)
    assert found is not None
    return found


@launcher("slots")
def launch(
    x: jax.Array,
    members: Sequence[Member],
    ids: jax.Array,
    step: jax.Array | None = None,
    *,
    slots: int | None = None,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, ...]:
    """Returns y [rows, out] of each member.

    Args:
      members: all with room for the same number of ranks.
      ids: i32[rows], from 0 to slots - 1; anything else for a row of zeros.
      step: `plan` of the ids; None to make it here.
      slots: of the layer; by default all that members have.
    """
    call = call_of(x, members, ids, step, slots)
    (held, _), sizes = call.x.shape, call.sizes
    parts = bank_rows_shrink.launch(*call, config)
    safe = jnp.pad(jnp.clip(ids, 0, sizes.slots - 1), (0, held - sizes.rows))
    ranks = jnp.stack([one.rank[one.first + safe] for one in call.members])[..., None]
    # Before the sum, so that XLA takes both in one kernel.
    parts = jnp.where(lax.broadcasted_iota(jnp.int32, parts.shape, 3) < ranks[None], parts, 0)
    z = jnp.sum(parts, axis=0)
    z = jnp.pad(z, ((0, 0), (0, 0), (0, padded(sizes.rank) - sizes.rank))).astype(x.dtype)
    results = bank_rows_expand.launch(z, *call[1:], config)
    return tuple(y[: sizes.rows] for y in results)
