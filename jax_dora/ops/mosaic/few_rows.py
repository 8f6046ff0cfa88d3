"""A projection of few rows: y = g∘(x W + s·(x A) B) + bias, W = σ∘v(q) where it is quantised.

    x  [rows, in]  bf16 or fp16                   σ  [in / t, out], t = in or a multiple of 64
    W  [in, out]  x's dtype, or q  int4, uint4 of NF4, int8 or float8_e4m3fn
    A  [in, r]    B  [r, out]    g  f32[out] or None    s  f32[]    bias  [out] or None
    y  [rows, out]  x's dtype

v takes codes to the numbers that they stand for, rounded to x's dtype (`few_rows_tile` multiplies a
tile). Scales are applied in fp32: of tiles to a tile's sums, of whole columns to the result. Two
kernels: `few_rows_sums` reads W and A, and `few_rows_finish` adds up what its thread blocks have
summed up, in a fixed order. More than `PASS_ROWS` rows take several passes.

Bytes: W, σ and A once a pass, which set the floor; x and the sums are in the level-2 cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_dora.ops.mosaic import few_rows_finish, few_rows_sums, few_rows_tile, few_rows_tiling
from jax_dora.ops.mosaic.hopper import SHARED_MEMORY, pad
from jax_dora.ops.mosaic.launch import launcher
from jax_dora.ops.mosaic.low_rank_tiling import TILE_ROWS, Config
from jax_dora.ops.quantised import Format, bits, repeated

MOST_ROWS = 64
MOST_RANK = 128
# Rows of a pass, by the bits of a number: a thread's sums of 4 bits take twice as many registers.
PASS_ROWS = {4: 32, 8: 64, 16: 64}


def refuses(
    rows: int,
    in_features: int,
    out: int,
    rank: int,
    form: Format | None,
    dtype: jax.typing.DTypeLike,
) -> str | None:
    """Returns why x [rows, in] of `dtype` and W [in, out] of a format, or of x's dtype, with an
    adapter of `rank` are not taken, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    if not 1 <= rank <= MOST_RANK:
        return f"the adapter's rank is {rank}, not 1 to {MOST_RANK}"
    if form is not None and form.has_zero_point:
        return f"the kernel's format is {form} with zero points"
    if in_features == 0 or in_features % TILE_ROWS:
        return f"in = {in_features} is not a multiple of {TILE_ROWS}"
    if form is not None and form.tile[0] % TILE_ROWS:
        return f"the kernel's format is {form}; a tile's rows must be a multiple of {TILE_ROWS}"
    width = _width(form)
    if out == 0 or out % width:
        return f"out = {out} is not a multiple of {width}"
    return None


def wins(rows: int, in_features: int, out: int, rank: int, form: Format | None, dtype: Any) -> bool:
    """Returns whether the kernels are taken to be no slower than XLA, which copies a quantised
    kernel in x's dtype before it multiplies (`benchmarks sizes`, `benchmarks quantised`)."""
    return in_features >= 1024 and out >= 1024


def config(
    rows: int, in_features: int, out: int, rank: int, form: Format | None, dtype: Any
) -> Config:
    """Returns the launch knobs for a call that is not refused."""
    stored = dtype if form is None else form.stored
    tiled = form is not None and form.tile[0] < in_features
    held = min(rows, PASS_ROWS[bits(stored)])

    def has_room(config: Config) -> bool:
        return few_rows_tiling.shared_memory(held, rank, stored, tiled, config) <= SHARED_MEMORY

    knobs = ((4, 2), (3, 2), (2, 2), (2, 1))
    configs = [Config(_width(form), stages, slots) for slots, stages in knobs]
    return next(filter(has_room, configs), configs[-1])


def _width(form: Format | None) -> int:
    """Returns the columns of a row of 128 bytes."""
    return few_rows_tile.TILE_BYTES // 2 if form is None else few_rows_tile.TILE_BYTES * form.packed


@launcher()
def launch(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array | None,
    lora_a: jax.Array,
    lora_b: jax.Array,
    g: jax.Array | None,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    config: Config,
    sm_count: int,
) -> jax.Array:
    """Returns y [..., out].

    Args:
      x: [..., in].
      w: numbers of x's dtype, or codes.
      scales: [in / t, out / u] of codes.
    """
    shape, (in_features, out) = x.shape, w.shape
    x = x.reshape(-1, in_features)
    of_columns = of_tiles = None
    if scales is not None:
        scales = repeated(scales, 1, out)
        of_columns, of_tiles = (scales[0], None) if scales.shape[0] == 1 else (None, scales)
    rows, most, passes = x.shape[0], PASS_ROWS[bits(w.dtype)], []
    if rows > most:
        x = pad(x, pl.cdiv(rows, most) * most, in_features)
    for first in range(0, rows, most):
        some = x[first : first + most]
        passes.append(few_rows_sums.launch(some, w, of_tiles, lora_a, config, sm_count))
    y = few_rows_finish.finished(passes, lora_b, of_columns, g, scale, bias, x.dtype)
    return y[:rows].reshape(*shape[:-1], out)
