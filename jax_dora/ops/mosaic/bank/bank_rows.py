"""The low-rank products of rows of one token with one adapter per row: y[n] = x[n] A[id]ᵀ B[id].

    x  [rows, in]       bf16 or fp16, 1 to 512 rows     id    i32[rows], the slot of each row
    A  [slots, r, in]   x's dtype; r is the bank's maximum rank
    B  [slots, r, out]  x's dtype                       rank  i32[slots], the adapters' own ranks
    y  [rows, out]      x's dtype; zeros in a row without a slot

There are two kernels, `bank_rows_shrink` and `bank_rows_expand`, each for all projections of the
same x; between them XLA adds the partial sums of x A in a fixed order. They do not depend on base,
so they may run concurrently with its product; XLA fuses the composition.

A thread block has a tile of 64 rows and a strip of columns of A or B. It loops over the slots in
use (those of any of its rows) and fetches each once, only the adapter's own rank, rounded up to a
multiple of 8. The tensor cores multiply 64 rows per instruction, in which rows of other slots are
replaced by zeros, and accumulate over the slots. Rows are not sorted and adapters are not copied.
The result of a row does not depend on the other rows.

Bytes: A and B of the slots in use, once, and y; the floor is bytes / copy rate. Other tiles of rows
read them from the L2 cache.
FLOPs: 2 · 64 · r · (in + out) for every tile of rows and slot in use.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_dora.ops.mosaic.bank import bank_rows_expand, bank_rows_shrink
from jax_dora.ops.mosaic.bank.bank_rows_sizes import Config, Member, Sizes, fastest_config, prepare
from jax_dora.ops.mosaic.bank.bank_rows_sizes import plan as plan
from jax_dora.ops.mosaic.hopper import limits
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import TILE_K

MOST_ROWS = 512
MOST_RANK = 128


def refuses(
    rows: int, in_features: int, out: int, slots: int, rank: int, dtype: DTypeLike, bank: DTypeLike
) -> str | None:
    """Returns why a call is not supported, or None.

    Args:
      rows, in_features, out, slots: the sizes.
      rank: the bank's maximum rank.
      dtype: x's dtype.
      bank: the dtype of A and B.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if bank != dtype:
        return f"x has dtype {jnp.dtype(dtype)}, and the bank {jnp.dtype(bank)}"
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    for name, size in (("in", in_features), ("out", out)):
        if size == 0 or size % TILE_K:
            return f"{name} = {size} is not a multiple of {TILE_K}"
    if rank % limits.ALIGNMENT or not 0 < rank <= MOST_RANK:
        return f"the bank's maximum rank {rank} is not a multiple of 8 from 8 to {MOST_RANK}"
    return None


def wins(
    rows: int, in_features: int, out: int, slots: int, rank: int, dtype: DTypeLike, bank: DTypeLike
) -> bool:
    """Returns whether the kernels were faster than all three ways of `bank_xla` (`benchmarks bank`,
    and for 512 rows `h100/tried.jsonl`: the projections of a layer of Llama 3 8B's dimensions, 64
    slots)."""
    return rows > 8 and min(in_features, out) >= 1024


def config(
    rows: int,
    in_features: int,
    out: int,
    slots: int,
    rank: int,
    dtype: DTypeLike,
    bank: DTypeLike,
    members: int = 1,
) -> Config:
    """Returns the config for a supported call."""
    return fastest_config(Sizes(rows, in_features, slots, rank), members)


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
    """Returns y [rows, out] for each member.

    Args:
      x: [rows, in].
      members: the adapters of each projection, all with the same maximum rank, at the ends of their
        slots (see `bank_slots.Slots`).
      ids: i32[rows], from 0 to slots - 1; any other id gives a row of zeros.
      step: `plan` of the ids, or None to compute it here.
      slots: the number of the layer's slots; by default all slots of the members.
      config, sm_count: see `choose.Choice`.
    """
    call = prepare(x, members, ids, step, slots)
    parts = bank_rows_shrink.launch(*call, config)
    z = jnp.sum(parts, axis=0).astype(x.dtype)
    results = bank_rows_expand.launch(z, *call[1:], config)
    return tuple(y[: call.sizes.rows] for y in results)
