"""A projection of few rows, as in decoding: y = g∘(x W + s·(x A) B) + bias, or y = x W.

W may be quantised.

    x  [rows, in]  bf16 or fp16
    W  [in, out]   x's dtype; or W = σ∘v(q)
    q  [in, out]   int4, uint4 (NF4), int8 or float8_e4m3fn
    σ  [in / t, out], t = in or a multiple of 64
    A  [in, r]     B  [r, out]    g  f32[out] or None    s  f32[]    bias  [out] or None
    y  [rows, out]  x's dtype

v maps codes to their numbers, rounded to x's dtype. Scales are applied in fp32: the scales of tiles
to the sums over a tile, the scales of whole columns to the result.

There are two kernels. `decode_sums` reads W and A and writes partial sums of x W and x A.
`decode_finish` adds the partial sums in a fixed order and computes the rest; without an adapter
XLA does so, in one pass with the operations that follow. `decode_tile` multiplies one tile.

Bytes: W, σ and A once; the floor is bytes / read rate. x and the partial sums stay in the L2 cache.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_dora.ops.mosaic.decode import decode_finish, decode_sums, decode_tiling
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import SHARED_MEMORY
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS, Config
from jax_dora.ops.quantised import Format, bits, repeated

MOST_ROWS = 64
MOST_RANK = 128
# Up to this number of rows, a tile of 4-bit codes has 256 columns if that divides W's. Otherwise it
# has 128, so that the sums of up to 64 rows need no more registers.
WIDE_ROWS = 32


def refuses(
    rows: int,
    in_features: int,
    out: int,
    rank: int,
    form: Format | None,
    dtype: jax.typing.DTypeLike,
) -> str | None:
    """Returns why a call is not supported, or None.

    Args:
      rows, in_features, out, rank: the sizes; the rank is 0 without an adapter.
      form: the format of a quantised W, or None for W of x's dtype.
      dtype: x's dtype.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {jnp.dtype(dtype)}, neither bfloat16 nor float16"
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows, not 1 to {MOST_ROWS}"
    if not 0 <= rank <= MOST_RANK:
        return f"the adapter's rank is {rank}, not up to {MOST_RANK}"
    if form is not None and form.has_zero_point:
        return f"the kernel's format is {form} with zero points"
    if in_features == 0 or in_features % TILE_ROWS:
        return f"in = {in_features} is not a multiple of {TILE_ROWS}"
    if form is not None and form.tile[0] % TILE_ROWS:
        return f"the kernel's format is {form}; a tile's rows must be a multiple of {TILE_ROWS}"
    width = _least_cols(form)
    if out == 0 or out % width:
        return f"out = {out} is not a multiple of {width}"
    return None


def wins(rows: int, in_features: int, out: int, rank: int, form: Format | None, dtype: Any) -> bool:
    """Returns whether the kernels are expected to be no slower than XLA, which writes a dequantised
    copy of W before it multiplies (`benchmarks sizes`, `benchmarks quantised`)."""
    return in_features >= 1024 and out >= 1024


def config(
    rows: int, in_features: int, out: int, rank: int, form: Format | None, dtype: Any
) -> Config:
    """Returns the config for a supported call: the most stages that fit into shared memory."""
    w_dtype = dtype if form is None else form.stored
    tiled = form is not None and form.tile[0] < in_features
    cols = _least_cols(form)
    if bits(w_dtype) == 4 and rows <= WIDE_ROWS and out % 256 == 0:
        cols = 256

    def fits(config: Config) -> bool:
        return decode_tiling.shared_memory(rows, rank, w_dtype, tiled, config) <= SHARED_MEMORY

    # (slots, stages): see `decode_sums`.
    candidates = ((4, 2), (3, 2), (2, 2), (2, 1))
    configs = [Config(cols, stages, slots) for slots, stages in candidates]
    return next(filter(fits, configs), configs[-1])


def _least_cols(form: Format | None) -> int:
    """Returns the least number of columns of a tile of W, which must divide W's."""
    return 64 if form is None else 128


@launcher()
def launch(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array | None,
    lora_a: jax.Array | None = None,
    lora_b: jax.Array | None = None,
    g: jax.Array | None = None,
    scale: jax.Array | float = 1.0,
    bias: jax.Array | None = None,
    *,
    config: Config,
    sm_count: int,
) -> jax.Array:
    """Returns y [..., out].

    Args:
      x: [..., in].
      w: W in x's dtype, or the codes q.
      scales: σ [in / t, out / u] if W is quantised.
      lora_a, lora_b, g, scale, bias: see the module; without an adapter all are left out.
      config, sm_count: see `choose.Choice`.
    """
    shape, (in_features, out) = x.shape, w.shape
    x = x.reshape(-1, in_features)
    column_scales = tile_scales = None
    if scales is not None:
        scales = repeated(scales, 1, out)
        if scales.shape[0] == 1:
            column_scales = scales[0]
        else:
            tile_scales = scales
    parts, *z = decode_sums.launch(x, w, tile_scales, lora_a, config, sm_count)
    if lora_b is None:
        y = decode_sums.added(parts, column_scales, x.dtype)
    else:
        given = parts, z[0], lora_b, column_scales, g, scale, bias
        y = decode_finish.finish(*given, x.dtype)
    return y.reshape(*shape[:-1], out)
