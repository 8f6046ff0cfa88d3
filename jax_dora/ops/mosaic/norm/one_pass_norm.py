"""The norm's square in one pass over the kernel: ‖W + s·A B‖² per output feature.

    W  [in, out]  bf16, fp16 or fp32     A  [in, r], B  [r, out]  bf16, fp16 or fp32
    s  f32[]                             norm² = Σ_in (W + s·A B)²  f32[out]

Given only some of W's rows, the result is the partial sum over those rows.

A tile of A B stays in registers, in fp32. There it is added to its tile of W, squared and summed,
so no [in, out] and no [r, out] array exists. Nothing cancels, so the result needs no clamp. The sum
has two stages and no atomics: every consumer writes one row of partial sums for every run,
f32[splits · consumers, out], and XLA adds these up. The order of the additions depends only on the
shape and the number of multiprocessors.

16-bit adapters go to the tensor cores unchanged: their products are exact in fp32. An fp32 adapter
is cut into p bf16 pieces of 8 bits, `x = x₁ + … + x_p + ε` with |ε| ≤ 2^(-8p)·|x|, and A B becomes
Σ A_i B_j over i + j ≤ p + 1. Dropped products and remainders together change A B by at most
(p + 1)·2^(-8p)·|A||B| (two pieces for a 16-bit W: 2^-14.4; three for an fp32 W: 2^-22), so that

    |error of the norm| ≤ (p + 1)·2^(-8p)·s·‖|A||B|‖ + fp32 accumulation.

Bytes: W, A and B once. FLOPs: 2 · in · r · out for each of the 1, 3 or 6 products of pieces, which
set the floor at ranks over 200.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper import limits
from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.projection.strip_kernel import Scales, Task, Tile, strip_kernel
from jax_dora.ops.mosaic.projection.strip_tiling import (
    CONFIGS,
    TILE_ROWS,
    Config,
    Tiling,
    first_with_room,
)

CHUNK = 64


def pieces(kernel_dtype: jax.typing.DTypeLike, adapter_dtype: jax.typing.DTypeLike) -> int:
    """Returns the number of 16-bit pieces that an adapter is cut into."""
    if jnp.dtype(adapter_dtype).itemsize == 2:
        return 1
    return 2 if jnp.dtype(kernel_dtype).itemsize == 2 else 3


def refuses(
    in_features: int,
    rank: int,
    out: int,
    kernel_dtype: jax.typing.DTypeLike,
    adapter_dtype: jax.typing.DTypeLike,
) -> str | None:
    """Returns why the kernel cannot take W [in, out] and A, B of `rank`, or None if it can."""
    kernel_dtype, adapter_dtype = jnp.dtype(kernel_dtype), jnp.dtype(adapter_dtype)
    for name, dtype in (("the kernel", kernel_dtype), ("the adapter", adapter_dtype)):
        if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"{name} has dtype {dtype}, none of bfloat16, float16, float32"
    if 0 in (in_features, rank, out):
        return f"one of in = {in_features}, rank = {rank}, out = {out} is 0"
    if in_features % limits.ROW_ALIGNMENT:
        return f"in = {in_features} is not a multiple of {limits.ROW_ALIGNMENT}"
    if out % limits.ALIGNMENT:
        return f"out = {out} is not a multiple of {limits.ALIGNMENT}"
    if config(in_features, rank, out, kernel_dtype, adapter_dtype) is None:
        return f"a strip of B of rank {rank} does not fit into shared memory"
    return None


def wins(in_features: int, rank: int, out: int, kernel_dtype: Any, adapter_dtype: Any) -> bool:
    """Returns whether the kernel was no slower than XLA on an H200.

    Measured by `benchmarks ops` at 1713ac4 from out = 1024 on, and at 3d42793 with in = 4096 and
    out = 512; by `benchmarks sizes` from in = 768 and out = 768 on. From 256 to 511 features (a
    device's part of k or v under tensor parallelism) it was not measured: the kernel is used
    because it takes two launches, and XLA takes a dozen.
    """
    narrow = in_features >= 4096 and out >= 256
    return (narrow or (in_features >= 768 and out >= 768)) and rank <= 768


def config(
    in_features: int, rank: int, out: int, kernel_dtype: Any, adapter_dtype: Any
) -> Config | None:
    """Returns the launch options, or None if no config fits into shared memory.

    The fastest config on an H200 (`benchmarks tune` at 9446849) is used if it fits, and otherwise
    the first of `CONFIGS` that fits.
    """
    resident = pieces(kernel_dtype, adapter_dtype) * limits.slices(rank)
    candidates = configs(resident)
    if in_features >= 1449 and 544 <= rank <= 768 and out >= 1024:
        candidates.insert(0, Config(tile_cols=64, stages=4, slots=1, consumers=3))
    elif in_features >= 768 and rank <= 768 and 768 <= out <= 4096:
        candidates.insert(0, Config(tile_cols=64, stages=4, slots=2))
    return first_with_room(candidates, resident, jnp.dtype(kernel_dtype).itemsize)


def configs(resident: int) -> list[Config]:
    """Returns the members of `CONFIGS` for a strip of B of `resident` slices."""
    # With many slices, a product takes long enough for one slot: the next tile arrives meanwhile.
    return [c for c in CONFIGS if resident <= 4 or c.slots == 1]


@launcher()
def launch(
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: jax.Array,
    *,
    config: Config,
    sm_count: int,
) -> jax.Array:
    """Returns the square of the norm, f32[out].

    Args:
      kernel: [in, out].
      lora_a: [in, r].
      lora_b: [r, out].
      scale: f32[].
      config, sm_count: the launch options.
    """

    def values(tile, chunks):
        for chunk in chunks:
            yield tile.smem[:, chunk].astype(jnp.float32)

    matrix = Matrix(kernel, values)
    count = pieces(kernel.dtype, lora_a.dtype)
    in_features, out = kernel.shape
    tiling = Tiling(in_features, out, config, sm_count)
    return squares(matrix, lora_a, lora_b, scale, count, tiling)[:out]


class Matrix(NamedTuple):
    """The matrix that the adapter is added to.

    Attributes:
      elements: the stored numbers or codes, [in, out].
      values: `(tile, chunks)` yields the values of each chunk of a tile's columns as
        f32[TILE_ROWS, chunk].
      table: a lookup table f32[n, tile_cols], which `values` gets as the tile's vectors; or None.
      scales: the scales [k, padded_out] of codes, a row for every in / k rows; or None.
      kernel_name: the name of the kernel in a compiled program.
    """

    elements: jax.Array
    values: Callable[[Tile, Any], Iterator[jax.Array]]
    table: jax.Array | None = None
    scales: jax.Array | None = None
    kernel_name: str = "dora_one_pass_norm"


def squares(
    matrix: Matrix,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: jax.Array,
    count: int,
    tiling: Tiling,
) -> jax.Array:
    """Returns Σ_in (matrix + scale · lora_a lora_b)², f32[padded_out], with the adapter cut into
    `count` pieces."""
    c = tiling.config
    lora_a, lora_b, products = cut_adapter(lora_a, lora_b, count)
    lora_b = limits.pad(lora_b, len(lora_b), tiling.padded_out)
    chunk = min(CHUNK, c.tile_cols)
    chunks = [pl.ds(start, chunk) for start in range(0, c.tile_cols, chunk)]

    def start():
        return (jnp.zeros((TILE_ROWS, chunk), jnp.float32),) * len(chunks)

    def epilogue(sums, tile, out_gmem, *, sums_smem):
        added = []
        for at, total, value in zip(chunks, sums, matrix.values(tile, chunks), strict=True):
            v = value + tile.scale * tile.acc[:, at.start : at.start + chunk]
            added.append(total + v * v)
        return tuple(added)

    def finish(sums, split, cols, out_gmem, *, sums_smem):
        for at, total in zip(chunks, sums, strict=True):
            sums_smem[at] = jnp.sum(total, axis=0)
        plgpu.commit_smem()
        row = split * c.consumers + lax.axis_index("warpgroup")
        plgpu.copy_smem_to_gmem(sums_smem, out_gmem[0].at[row, cols])
        # The next consumer reuses `sums_smem`.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    tables = [] if matrix.table is None else [matrix.table]
    scales, of_tile = [], None
    if matrix.scales is not None:
        scales, shared = [matrix.scales], tiling.row_tiles // len(matrix.scales)
        of_tile = Scales(
            c.tile_cols, matrix.scales.dtype, lambda tile, _, cols: (lax.div(tile, shared), cols)
        )
    partial_rows = tiling.splits * c.consumers
    (partials,) = strip_kernel(
        tiling,
        Task(
            products=products,
            epilogue=epilogue,
            start=start,
            finish=finish,
            scales=of_tile,
            vectors=sum(len(one) for one in tables),
        ),
        lora_a.dtype,
        matrix.elements.dtype,
        out_type=[jax.ShapeDtypeStruct((partial_rows, tiling.padded_out), jnp.float32)],
        scratch={"sums_smem": plgpu.SMEM((c.tile_cols,), jnp.float32)},
        kernel_name=matrix.kernel_name,
    )(lora_a, lora_b, matrix.elements, jnp.reshape(scale, 1).astype(jnp.float32), *tables, *scales)
    return jnp.sum(partials, axis=0)


def cut_adapter(
    lora_a: jax.Array, lora_b: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, list[tuple[int, ...]]]:
    """Cuts an adapter into `count` pieces that lie side by side, padded for TMA.

    Returns:
      lora_a [in, k], lora_b [k, out], and for each slice of `TILE_K` columns of lora_a the slices
      of rows of lora_b that it multiplies.
    """
    slices = limits.slices(lora_a.shape[1])
    width = limits.padded_rank(lora_a.shape[1]) if count == 1 else slices * limits.TILE_K
    (in_features, _), (_, out) = lora_a.shape, lora_b.shape
    pieces_of_a = [limits.pad(piece, in_features, width) for piece in cut(lora_a, count)]
    pieces_of_b = [limits.pad(piece, width, out) for piece in cut(lora_b, count)]
    # Products of pieces i and j with i + j ≥ count lie below the last bit that is kept.
    products = [
        tuple(j * slices + k for j in range(count - i)) for i in range(count) for k in range(slices)
    ]
    return jnp.concatenate(pieces_of_a, axis=1), jnp.concatenate(pieces_of_b, axis=0), products


def cut(x: jax.Array, count: int) -> list[jax.Array]:
    """Returns `count` bf16 arrays of 8 bits that add up to the fp32 x, or [x] if `count` is 1."""
    if count == 1:
        return [x]
    found = []
    for _ in range(count):
        # Not a cast to bf16 and back, because XLA may remove it.
        piece = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        found.append(piece.astype(jnp.bfloat16))
        x = x - piece
    return found
