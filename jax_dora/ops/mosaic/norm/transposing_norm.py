"""The norm's square and the transposed codes, in one pass over a kernel in FP8.

    q  [in, out]  float8_e4m3fn, W = σ∘q      σ  [1, out]
    A  [in, r], B  [r, out]  bf16, fp16 or fp32    s  f32[]
    norm² = Σ_in (W + s·A B)²  f32[out]      qᵀ  [out, in]

Tensor cores multiply FP8 only where the summed features are contiguous. A projection whose gradient
reads q as it is stored therefore reads qᵀ in the forward pass, where its norm is computed, too.
This is the kernel of `stationary_norm`, in which a thread also writes the codes that it has in its
registers, 16 adjacent bytes of each column. With adapters of one slice it has four consumers, as
two wait for the latency of each other's steps, and a tile of A then serves twice as many columns.

Bytes: q once, and once written; the floor is bytes / copy rate. FLOPs: as in `stationary_norm`.
"""

import jax

from jax_dora.ops.mosaic.hopper import limits
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.norm import stationary_norm
from jax_dora.ops.mosaic.norm.stationary_tile import COLUMNS
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS, Config
from jax_dora.ops.quantised import Format

QTYPE = "float8_e4m3fn"
CONSUMERS, MOST_SLOTS = 4, 6
MOST_RANK = 64


def refuses(
    in_features: int,
    rank: int,
    out: int,
    stored: Format,
    adapter_dtype: jax.typing.DTypeLike,
) -> str | None:
    """Returns why the kernel cannot take codes q [in, out] of a format, with an adapter of `rank`,
    or None if it can."""
    if stored.qtype != QTYPE or stored.tile != (in_features, 1):
        return f"the kernel's format is {stored}; expected {QTYPE} with one scale per column"
    return stationary_norm.refuses(in_features, rank, out, stored, adapter_dtype)


def wins(
    in_features: int, rank: int, out: int, stored: Format, adapter_dtype: jax.typing.DTypeLike
) -> bool:
    """Returns whether the kernel is faster than `stationary_norm` and XLA's transpose.

    Measured at rank 16 in bf16 (H200, `h200/tried.jsonl`, "norm and transposed codes"): 131 µs for
    8192 × 28,672 instead of 88 and 154, and 142 with two consumers. In fp32, which has two slices
    (the same file, "norm and transposed codes, fp32 adapters"): 152 µs at rank 16 instead of 117
    and 179, 183 at rank 64 instead of 161 and 179. Four consumers take 156 and 327 there, but in
    three of five shapes at rank 16 they are up to 8 % faster than two. Higher ranks were not
    measured.
    """
    is_small = rank <= MOST_RANK
    return is_small and stationary_norm.wins(in_features, rank, out, stored, adapter_dtype)


def config(
    in_features: int, rank: int, out: int, stored: Format, adapter_dtype: jax.typing.DTypeLike
) -> Config:
    """Returns the launch options for a call that `refuses` accepts."""
    given = stationary_norm.config(in_features, rank, out, stored, adapter_dtype)
    slices = stationary_norm.slices_of(rank, adapter_dtype)
    if slices > 1 or out % (CONSUMERS * COLUMNS):
        return given
    cols, stages = CONSUMERS * COLUMNS, given.stages
    room = limits.SHARED_MEMORY - limits.RESERVED - stages * TILE_ROWS * limits.TILE_K * 2
    slots = min(room // (TILE_ROWS * cols), MOST_SLOTS)
    return Config(tile_cols=cols, stages=stages, slots=slots, consumers=CONSUMERS)


@launcher()
def launch(
    codes: jax.Array, *operands: jax.Array, config: Config, sm_count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (the square of the norm, f32[out], and the codes [out, in]).

    Args:
      codes: [in, out].
      *operands: the scales [1, out], lora_a [in, r], lora_b [r, out], and scale f32[].
      config, sm_count: the launch options.
    """
    options = {"want_codes": True, "kernel_name": "dora_transposing_norm"}
    squared, turned = stationary_norm.squares(
        codes, *operands, config=config, sm_count=sm_count, **options
    )
    return squared, turned
