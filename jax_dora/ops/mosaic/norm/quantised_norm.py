"""The norm's square in one pass over a quantised kernel: ‖σ∘q + s·A B‖² per output feature.

    q  [in, out]  int8, float8_e4m3fn, int4, or uint4 of NF4
    σ  [in / t, out], t a multiple of 64
    A  [in, r], B  [r, out]  bf16 or fp32     s  f32[]     norm² = Σ_in (σ∘v(q) + s·A B)²  f32[out]

v(q) is q itself, or for NF4 the level with number q. The kernel is the one of `one_pass_norm`,
except that each tile of q is converted to fp32 in registers before A B is added, so no [in, out]
array of floats exists. 4-bit codes are looked up (`codebook`).

Bytes: q and σ once (0.27 of a bf16 kernel's bytes for 4 bits, 0.5 for 8 bits), A and B once. FLOPs:
as in `one_pass_norm`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.mosaic.hopper import codebook, limits
from jax_dora.ops.mosaic.hopper.codebook import looked_up
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.norm import one_pass_norm
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS, Config, Tiling, first_with_room
from jax_dora.ops.quantised import Format, bits, repeated


def refuses(
    in_features: int, rank: int, out: int, form: Format, adapter_dtype: jax.typing.DTypeLike
) -> str | None:
    """Returns why the kernel cannot take q [in, out] of a format and A, B of `rank`, or None."""
    adapter_dtype = jnp.dtype(adapter_dtype)
    if form.has_zero_point:
        return f"the kernel's format is {form} with zero points"
    if adapter_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the adapter has dtype {adapter_dtype}, none of bfloat16, float16, float32"
    if 0 in (in_features, rank, out):
        return f"one of in = {in_features}, rank = {rank}, out = {out} is 0"
    if form.tile[0] % TILE_ROWS:
        return f"the kernel's format is {form}; a tile's rows must be a multiple of {TILE_ROWS}"
    # TMA copies rows of whole 16 bytes.
    alignment = 16 * form.packed
    if out % alignment:
        return f"out = {out} is not a multiple of {alignment}"
    if config(in_features, rank, out, form, adapter_dtype) is None:
        return f"a strip of B of rank {rank} does not fit into shared memory"
    return None


def wins(in_features: int, rank: int, out: int, form: Format, adapter_dtype: Any) -> bool:
    """Returns whether the kernel is expected to be no slower than XLA, as `one_pass_norm` was
    measured to be from 1024 input and output features on."""
    return in_features >= 1024 and out >= 1024 and rank <= 768


def config(
    in_features: int, rank: int, out: int, form: Format, adapter_dtype: Any
) -> Config | None:
    """Returns the launch options, or None if no config fits into shared memory."""
    resident = one_pass_norm.pieces(jnp.bfloat16, adapter_dtype) * limits.slices(rank)
    # A code has at most one byte, and a column of a tile at most one scale of four bytes.
    return first_with_room(one_pass_norm.configs(resident), resident, 2)


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
    """Returns the square of the norm, f32[out].

    Args:
      qvalue: the codes, [in, out].
      scales: [in / t, out / u].
      lora_a: [in, r].
      lora_b: [r, out].
      scale: f32[].
      config, sm_count: the launch options.
    """
    in_features, out = qvalue.shape
    tiling = Tiling(in_features, out, config, sm_count)
    is_packed = bits(qvalue.dtype) == 4

    def values(tile, chunks):
        for chunk in chunks:
            codes = tile.smem.at[:, chunk]
            if is_packed:
                value = looked_up(codes, tile.vectors_smem)
            else:
                value = codes[...].astype(jnp.float32)
            scale = tile.scales_smem[chunk].astype(jnp.float32)
            yield value * lax.broadcast_in_dim(scale, value.shape, (1,))

    table = jnp.asarray(codebook.table(qvalue.dtype, config.tile_cols)) if is_packed else None
    scales = repeated(scales, 1, out)
    scales = limits.pad(scales, len(scales), tiling.padded_out)
    matrix = one_pass_norm.Matrix(qvalue, values, table, scales, "dora_quantised_norm")
    count = one_pass_norm.pieces(jnp.bfloat16, lora_a.dtype)
    return one_pass_norm.squares(matrix, lora_a, lora_b, scale, count, tiling)[:out]
