"""The low-rank products of rows of one token with one adapter per row, y[n] = x[n] A[id]ᵀ B[id], by
`dora_common.triton.bank_shrink` and `bank_expand`.

    x  [rows, in]       bf16 or fp16        id    i32[rows], the slot of each row
    A  [slots, r, in]   x's dtype; r is the bank's maximum rank
    B  [slots, r, out]  x's dtype           rank  i32[slots], the adapters' own ranks
    y  [rows, out]      x's dtype; zeros in a row without a slot

A program computes up to 16 rows of one slot, whose numbers `plan` puts together once a step. The
result of a row does not depend on the other rows.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_dora.ops.mosaic.bank.bank_rows_sizes import Member
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.triton import triton_bank_expand, triton_bank_shrink

# The rows of a program, `dora_common.triton.bank_shrink.MIN_ROWS`.
GROUP = 16
# `plan` compares all pairs of rows.
MOST_ROWS = 512


def refuses(
    rows: int, in_features: int, out: int, slots: int, rank: int, dtype: DTypeLike, bank: DTypeLike
) -> str | None:
    """Returns why a call is not supported, or None; the arguments are those of Mosaic's
    `bank_rows`."""
    if bank != dtype:
        return f"x has dtype {jnp.dtype(dtype)}, and the bank {jnp.dtype(bank)}"
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    return triton_bank_shrink.refuses(rows, 1, min(in_features, out), rank, dtype)


def wins(
    rows: int, in_features: int, out: int, slots: int, rank: int, dtype: DTypeLike, bank: DTypeLike
) -> bool:
    """Returns False: on an H200, the kernels were timed beside one of XLA's ways only, in which
    each row has a copy of its adapter (`h200/tried.jsonl`, "Triton kernels beside XLA")."""
    return False


def config(capability: int, *call: Any) -> Any:
    """Returns the launch options of both kernels for a compute capability."""
    return (triton_bank_shrink.config(capability), triton_bank_expand.config(capability))


def plan(ids: jax.Array, slots: int) -> jax.Array:
    """Returns the rows of each program, i32[programs, GROUP]: of one slot each, or of
    none, filled up with -1. There are as many programs as any ids of this number need."""
    rows = ids.shape[0]
    ids = jnp.where((ids >= 0) & (ids < slots), ids, -1)
    number = jnp.arange(rows, dtype=jnp.int32)
    # All pairs of rows are compared and summed, because XLA compiles each sum to one kernel.
    earlier = (ids[None] == ids[:, None]) & (number[None] < number[:, None])
    place = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    begins = (ids[None] < ids[:, None]) & (place[None] % GROUP == 0)
    program = jnp.sum(begins, axis=1, dtype=jnp.int32) + place // GROUP
    kinds = min(rows, slots + 1)
    programs = min(rows, kinds + (rows - kinds) // GROUP)
    target = jnp.arange(programs * GROUP, dtype=jnp.int32)
    is_there = target[:, None] == (program * GROUP + place % GROUP)[None]
    found = jnp.max(jnp.where(is_there, number[None], -1), axis=1)
    return found.reshape(programs, GROUP)


@launcher("slots", "capability")
def launch(
    x: jax.Array,
    members: Sequence[Member],
    ids: jax.Array,
    step: jax.Array | None = None,
    *,
    slots: int | None = None,
    config: Any,
    capability: int,
) -> tuple[jax.Array, ...]:
    """Returns y [rows, out] for each member; the arguments are those of Mosaic's `bank_rows`, with
    `step` from `plan`."""
    slots = slots or members[0].rank.shape[0]
    groups = plan(ids, slots) if step is None else step
    shrink, expand = config
    results = []
    for member in members:
        which = (ids, groups, member.rank, member.first.astype(jnp.int32).reshape(1), slots)
        parts = triton_bank_shrink.products(x[:, None], member.lora_a, *which, shrink, capability)
        z = jnp.sum(parts, axis=0)[:, None]
        result = jax.ShapeDtypeStruct((x.shape[0], 1, member.lora_b.shape[2]), x.dtype)
        nothing = triton_bank_expand.NO_BASE
        y = triton_bank_expand.products(
            z, member.lora_b, *which, nothing, result, expand, capability
        )
        results.append(y[:, 0])
    return tuple(results)
