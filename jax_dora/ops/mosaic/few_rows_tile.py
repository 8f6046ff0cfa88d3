"""The product of few rows with a tile of a kernel, on tensor cores.

The instruction m16n8k16 takes Wᵀ from registers: 16 columns of W for M, 8 rows of x for N; and so
does a warpgroup's, m64n8·nk16, to which every warp gives 16 columns, and whose x lies in shared
memory. A register holds the numbers of two neighbouring rows of W in one column.

    16 bits  numbers are stored as they are multiplied, and `ldmatrix` transposes them unless they
             lie transposed
    int8     the byte of either row is met in one register, and arithmetic that is exact makes
             two numbers of it
    4 bits   of codes two words, one of either row, are met nibble by nibble, and a byte of both is
             the place of such a pair in a table of 256
    FP8      codes are looked up one by one

`few_rows_reads` says what lane 4g + t reads, `few_rows_layout` which sums it has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jax_dora.ops import choose
from jax_dora.ops.mosaic import codebook, ptx
from jax_dora.ops.mosaic.few_rows_layout import layout, put_together, taken_apart
from jax_dora.ops.mosaic.few_rows_reads import (
    ROWS,
    STEP,
    TILE_BYTES,
    Bytes,
    Looked,
    Numbers,
    Transposed,
    X,
)
from jax_dora.ops.mosaic.low_rank_tiling import TILE_ROWS
from jax_dora.ops.quantised import bits

# More rows than these by codes are a warpgroup's product.
WARPS_ROWS = 8


def table(numbers: np.ndarray, dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Returns u32[256, 32], a column for each lane: of 16 numbers all pairs, a lower code's in the
    lower half; of 256 each number in both halves.

    Args:
      numbers: what the codes from 0 on stand for; they are rounded to `dtype`.
      dtype: bfloat16 or float16.
    """
    numbers = numbers.astype(jnp.dtype(dtype)).view(np.uint16).astype(np.uint32)
    code = np.arange(256)
    low, high = (code & 15, code >> 4) if numbers.size == 16 else (code, code)
    entries = numbers[low] | (numbers[high] << 16)
    return np.repeat(entries[:, None], ptx.LANES, axis=1)


def table_for(stored: Any, dtype: jax.typing.DTypeLike) -> np.ndarray | None:
    """Returns the table that W of dtype `stored` is looked up in, or None."""
    if bits(stored) == 16 or stored == jnp.int8:
        return None
    return table(codebook.numbers(stored), dtype)


def multiplied(
    sums: jax.Array,
    x_smem: Any,
    w_smem: Any,
    table_smem: Any = None,
    *,
    swizzled_w: bool = True,
    transposed_w: bool = False,
) -> jax.Array:
    """Returns sums + x w for f32[n, columns] laid out by `layout`, x [rows, 64], w [64, columns].

    Of fewer than 8 rows, which lie as they are, n is 8 and the last is repeated. Otherwise there
    are n, a multiple of 8. They, and w unless told otherwise, are laid out with a swizzle of 128
    bytes. x may have more columns, and then no swizzle. W of 16 bits and fewer than 64 columns has
    a multiple of 8, and the further sums are finite where the others are.

    Args:
      table_smem: of `table`, or None where W is no codes that are looked up.
      transposed_w: w, of 16 bits and 64 columns, lies transposed.
    """
    if choose.interpreted():
        return _as_defined(sums, x_smem, w_smem, table_smem, transposed_w)
    of_sums = layout(w_smem.dtype)
    found = plgpu.ShapeDtypeStruct(sums.shape, jnp.dtype("float32"), layout=of_sums)
    swizzled_x = x_smem.shape[0] % ROWS == 0 and x_smem.shape[1] == TILE_ROWS
    tiles = [
        plgpu.RefType(_transforms(one.dtype) if swizzled else ())
        for one, swizzled in ((x_smem, swizzled_x), (w_smem, swizzled_w))
    ]
    half = "bf16" if x_smem.dtype == jnp.bfloat16 else "f16"
    dtype, (rows, pitch) = w_smem.dtype, x_smem.shape
    columns = w_smem.shape[1]
    given = [plgpu.RefType()] * (table_smem is not None)

    @plgpu.inline_mgpu(arg_types=(of_sums, *tiles, *given), return_type=found)
    def multiply(_, sums, x_smem, w_smem, *table_smem):
        x = X(rows, 0 if swizzled_x else 2 * pitch, x_smem)
        if transposed_w:
            w: Any = Transposed(w_smem)
        elif bits(dtype) == 16:
            w = Numbers(columns, swizzled_w, w_smem)
        elif dtype == jnp.int8:
            w = Bytes(half, w_smem)
        else:
            w = Looked(bits(dtype), w_smem, *table_smem)
        if rows > WARPS_ROWS and swizzled_x and bits(dtype) < 16:
            return _added_by_warpgroup(half, sums, x_smem, w)
        return _added(half, sums, x, w)

    call: Callable[..., Any] = multiply
    return call(sums, x_smem, w_smem, *[table_smem] * len(given))


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory for tiles of 128 bytes a row, as `multiplied` reads them."""
    return plgpu.SMEM(shape, dtype, transforms=_transforms(dtype))


def _transforms(dtype: Any) -> tuple[Any, ...]:
    tiling = plgpu.TilingTransform((8, 8 * TILE_BYTES // bits(dtype)))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(TILE_BYTES)  # pyright: ignore[reportAbstractUsage]


def _as_defined(
    sums: jax.Array, x_smem: Any, w_smem: Any, table_smem: Any, transposed_w: bool
) -> jax.Array:
    """Computes what `multiplied` does, in the interpreter."""
    x, values = x_smem[...][:, :TILE_ROWS], w_smem[...]
    if transposed_w:
        values = values.T
    if table_smem is not None:
        unsigned = {4: jnp.uint4, 8: jnp.uint8}[bits(values.dtype)]
        codes = lax.bitcast_convert_type(values, unsigned).astype(jnp.int32)
        low = (table_smem[...][:, 0] & 0xFFFF).astype(jnp.uint16)
        values = lax.bitcast_convert_type(low, x.dtype)[codes]
    x = jnp.pad(x, ((0, sums.shape[0] - x.shape[0]), (0, 0)), mode="edge")
    values = jnp.pad(values, ((0, 0), (0, sums.shape[1] - values.shape[1])), mode="edge")
    return sums + jnp.dot(x.astype(jnp.float32), values.astype(jnp.float32), precision="highest")


def _added(half: str, sums: mgpu.FragmentedArray, x: X, w: Any) -> mgpu.FragmentedArray:
    """Returns sums plus the product, by each warp's own instructions."""
    total = taken_apart(sums)
    for step in range(TILE_ROWS // STEP):
        left = w.step(step * STEP)
        for rows in range(len(total)):
            right = [x.numbers(rows, 2 * step + half_) for half_ in range(2)]
            for first in range(0, w.word, 2):
                pair = slice(first, first + 2)
                # Two columns' sums for two rows of x.
                into = total[rows, :, pair].T
                found = _mma(half, [*left[0][pair], *left[1][pair]], right, list(into.flat))
                total[rows, :, pair] = np.array(found, object).reshape(2, 2).T
    return put_together(sums, total)


def _added_by_warpgroup(
    half: str, sums: mgpu.FragmentedArray, x_smem: Any, w: Any
) -> mgpu.FragmentedArray:
    """Returns sums plus the product, by the warpgroup's instructions, which read x themselves."""
    sums = mgpu.optimization_barrier(sums)
    total = taken_apart(sums)
    count = len(total)
    x = ptx.descriptor(x_smem, TILE_BYTES * ROWS)
    for step in range(TILE_ROWS // STEP):
        left = ptx.pinned([one for half_ in w.step(step * STEP) for one in half_])
        ptx.act("wgmma.fence.sync.aligned;")
        at = arith.addi(x, ptx.i64(step * 2 * STEP // 16))
        for first in range(0, w.word, 2):
            pair = slice(first, first + 2)
            four = [*left[: w.word][pair], *left[w.word :][pair]]
            into = list(total[:, :, pair].transpose(0, 2, 1).flat)
            found = _wgmma(half, four, at, into)
            total[:, :, pair] = np.array(found, object).reshape(count, 2, 2).transpose(0, 2, 1)
        ptx.act("wgmma.commit_group.sync.aligned;")
    ptx.act("wgmma.wait_group.sync.aligned 0;")
    return mgpu.optimization_barrier(put_together(sums, total))


def _mma(
    half: str, left: Sequence[ir.Value], right: Sequence[ir.Value], sums: Sequence[ir.Value]
) -> list[ir.Value]:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    return ptx.several(ir.F32Type.get(), 4, [*left, *right, *sums], text, constraints)


def _wgmma(
    half: str, left: Sequence[ir.Value], x: ir.Value, sums: list[ir.Value]
) -> list[ir.Value]:
    count = len(sums)
    into = ",".join(f"${i}" for i in range(count))
    given = [f"${i}" for i in range(2 * count, 2 * count + 5)]
    text = (
        "{ .reg .pred p; setp.eq.b32 p, 0, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.{half}.{half} {{{into}}}, "
        f"{{{','.join(given[:4])}}}, {given[4]}, p, 1, 1, 0; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"]
    operands = [*sums, *left, x]
    return ptx.several(ir.F32Type.get(), count, operands, text, ",".join(constraints), effects=True)
