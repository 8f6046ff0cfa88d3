"""The norm's square in one pass over a quantised kernel: ‖σ∘q + s·A B‖² per output feature.

    q  [in, out]  int8, float8_e4m3fn, or uint8 [in, out/2] of two 4-bit numbers each
    σ  f32[in / t, out], t a multiple of 64
    A  [in, r], B  [r, out]  bf16 or fp32     s  f32[]     norm² = Σ_in (σ∘v(q) + s·A B)²  f32[out]

v(q) is q itself, or of "nf4" the level that q numbers. The kernel is `norm`'s, but for what it does
with a tile of the matrix: q becomes fp32 in registers, where it meets its tile of A B. No [in, out]
array of floats is made anywhere.

Of two 4-bit numbers in a byte the first is the lower. A strip of B has its even columns first,
then its odd ones, so that the lower numbers of a tile of bytes meet one half of A B's tile and the
upper ones the other; the result's columns are put back in order.

Bytes: q and σ once (0.27 of a bf16 kernel's for 4 bits, 0.5 for 8), A, B once. FLOPs as `norm`'s.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.mosaic import hopper, norm
from jax_dora.ops.mosaic.launch import launcher
from jax_dora.ops.mosaic.low_rank_tiling import CONFIGS, TILE_ROWS, Config, Tiling, has_room
from jax_dora.ops.quantised import NF4, Format, repeated

# Columns that an element of a format's bytes holds.
PACKED = {"nf4": 2, "int4": 2, "int8": 1, "float8_e4m3fn": 1}


def refuses(
    in_features: int, rank: int, out: int, form: Format, adapter_dtype: jax.typing.DTypeLike
) -> str | None:
    """Returns why q [in, out] of a format, and A, B of rank `rank` are not taken, or None."""
    adapter_dtype = jnp.dtype(adapter_dtype)
    if form.has_zero_point:
        return f"the kernel's format is {form} with zero points"
    if adapter_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the adapter has dtype {adapter_dtype}, none of bfloat16, float16, float32"
    if 0 in (in_features, rank, out):
        return f"one of in = {in_features}, rank = {rank}, out = {out} is 0"
    if form.tile[0] % TILE_ROWS:
        return f"the kernel's format is {form}; a tile's rows must be a multiple of {TILE_ROWS}"
    # The copy engine reads rows of 16 bytes.
    alignment = 16 * PACKED[form.qtype]
    if out % alignment:
        return f"out = {out} is not a multiple of {alignment}"
    if _config(rank, adapter_dtype) is None:
        return f"a strip of B of rank {rank} does not fit into shared memory"
    return None


def wins(in_features: int, rank: int, out: int, form: Format, adapter_dtype: Any) -> bool:
    """Returns whether the kernel was no slower than XLA's blocks (H100, `benchmarks quantised`)."""
    return in_features >= 1024 and out >= 1024 and rank <= 768


def config(in_features: int, rank: int, out: int, form: Format, adapter_dtype: Any) -> Config:
    """Returns the launch knobs for a call that is not refused."""
    found = _config(rank, adapter_dtype)
    assert found is not None
    return found


def _config(rank: int, adapter_dtype: Any) -> Config | None:
    resident = norm.pieces(jnp.bfloat16, adapter_dtype) * hopper.slices(rank)
    candidates = [c for c in CONFIGS if resident <= 4 or c.slots == 1]
    # A tile takes at most one byte a column, and a scale of four for 64 rows.
    return next((c for c in candidates if has_room(c, resident, 2)), None)


@launcher()
def launch(
    qvalue: jax.Array,
    scales: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: jax.Array,
    *,
    config: Config,
    sm_count: int,
) -> jax.Array:
    """Returns f32[out]: the square of the norm of qvalue [in, out], scaled by `scales`
    [in / t, out / u] and adapted by lora_a [in, r] and lora_b [r, out]."""
    in_features, out = qvalue.shape
    is_nf4, packed = qvalue.dtype == jnp.uint4, 2 if qvalue.dtype in (jnp.uint4, jnp.int4) else 1
    tiling = Tiling(in_features, out, config, sm_count)
    scales = repeated(scales.astype(jnp.float32), 1, out)
    scales = hopper.pad(scales, scales.shape[0], tiling.padded_out)
    elements = qvalue
    if packed == 2:
        pairs = qvalue.reshape(in_features, out // 2, 2)
        elements = lax.bitcast_convert_type(pairs, jnp.uint8)
        lora_b = hopper.pad(lora_b, lora_b.shape[0], tiling.padded_out)
        lora_b, scales = _halves(lora_b, config.tile_cols), _halves(scales, config.tile_cols)

    def values(tile, chunk):
        if packed == 2:
            byte = tile.smem[...].astype(jnp.int32)
            number = byte & 15 if chunk.start == 0 else byte >> 4
            value = _level(number) if is_nf4 else ((number ^ 8) - 8).astype(jnp.float32)
        else:
            value = tile.smem[:, chunk].astype(jnp.float32)
        return value * lax.broadcast_in_dim(tile.scales_smem[chunk], value.shape, (1,))

    matrix = norm.Matrix(elements, values, packed, scales)
    count = norm.pieces(jnp.bfloat16, lora_a.dtype)
    squared = norm.squares(matrix, lora_a, lora_b, scale, count, tiling)
    if packed == 2:
        strips = squared.reshape(tiling.strips, 2, config.tile_cols // 2)
        squared = strips.swapaxes(1, 2).reshape(tiling.padded_out)
    return squared[:out]


def _halves(x: jax.Array, tile_cols: int) -> jax.Array:
    """Returns x [k, columns] with the even columns of each strip before its odd ones."""
    strips = x.reshape(x.shape[0], -1, tile_cols // 2, 2)
    return strips.swapaxes(2, 3).reshape(x.shape)


def _level(number: jax.Array) -> jax.Array:
    """Returns the NF4 level of each i32 number of 4 bits: a tree of choices, a bit a level."""
    levels: list[Any] = [jnp.float32(level) for level in NF4]
    for bit in range(4):
        is_set = (number & (1 << bit)) != 0
        levels = [
            jnp.where(is_set, upper, lower)
            for lower, upper in zip(levels[::2], levels[1::2], strict=True)
        ]
    return levels[0]
