"""Expand and compose in one pass, for groups of rows with one adapter per group, by
`dora_common.triton.bank_expand`.

    y[n] = g[n]∘(base[n] + s[n]·(z[n] B[slot[n]])) [+ bias]

    base  [groups, time, out]  bf16 or fp16     z  [groups, time, r]
    B     [slots, r, out]      base's dtype     slot  i32[groups]     s  f32[groups]
    g     f32[groups, out]     bias  [out] (optional)                 y  [groups, time, out]

Where g is 1 and s is 0, y is base (+ bias), bit for bit. B is read from the bank, without a copy.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.triton import triton_bank_shrink
from jax_dora.ops.triton.kernel_call import kernel_call


def refuses(groups: int, time: int, rank: int, out: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Returns why base [groups, time, out], z [groups, time, rank] and B of `dtype` are not
    supported, or None."""
    if out == 0:
        return "out is 0"
    return triton_bank_shrink.refuses(groups, time, out, rank, dtype)


def wins(*call: Any) -> bool:
    """Returns False: on an H200, the kernel was timed beside one of XLA's ways only, in which each
    row has a copy of its adapter (`h200/tried.jsonl`, "Triton kernels beside XLA")."""
    return False


def config(capability: int, *call: Any) -> Any:
    """Returns the launch options for a compute capability."""
    from dora_common.triton import bank_expand

    return bank_expand.config(capability)


@launcher("capability")
def launch(
    base: jax.Array,
    z: jax.Array,
    lora_b: jax.Array,
    slot: jax.Array,
    g: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    config: Any,
    capability: int,
) -> jax.Array:
    """Returns y [groups, time, out]."""
    result = jax.ShapeDtypeStruct(base.shape, base.dtype)
    composed = {"base_ptr": base, "g_ptr": g, "scale_ptr": scale, "bias_ptr": bias}
    held = lora_b.shape[0]
    return products(z, lora_b, slot, None, None, None, held, composed, result, config, capability)


NO_BASE: dict[str, Any] = dict.fromkeys(("base_ptr", "g_ptr", "scale_ptr", "bias_ptr"))


def products(
    z: jax.Array,
    lora_b: jax.Array,
    ids: jax.Array,
    grouped: jax.Array | None,
    ranks: jax.Array | None,
    first: jax.Array | None,
    slots: int,
    composed: Mapping[str, Any],
    result: jax.ShapeDtypeStruct,
    config: Any,
    capability: int,
) -> jax.Array:
    """Returns `result` [batch, time, out] of z [batch, time, r]; the arguments are the kernel's,
    with `composed` or `NO_BASE`."""
    from dora_common.triton import bank_expand, bank_shrink
    from dora_common.triton.jit import cdiv, next_power_of_2

    (batch, time, features), rank = result.shape, lora_b.shape[1]
    rows = bank_shrink.tile_rows(time)
    tiles = batch * cdiv(time, rows) if grouped is None else grouped.shape[0]
    (y,) = kernel_call(
        bank_expand.kernel,
        (tiles, cdiv(features, config.columns)),
        capability,
        warps=config.warps,
        z_ptr=z,
        b_ptr=lora_b,
        ids_ptr=ids,
        groups_ptr=grouped,
        rank_ptr=ranks,
        first_ptr=first,
        y_ptr=result,
        time=time,
        features=features,
        slots=slots,
        RANKS=rank,
        PADDED_RANKS=max(bank_shrink.MIN_ROWS, next_power_of_2(rank)),
        HAS_BIAS=composed["bias_ptr"] is not None,
        OF_ROWS=True,
        ROWS=rows,
        COLUMNS=config.columns,
        GROUPED=grouped is not None,
        AT_END=True,
        **composed,
    )
    return y
