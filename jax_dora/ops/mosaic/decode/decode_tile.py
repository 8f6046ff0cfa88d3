"""The product of few rows of x with a tile of W, on tensor cores.

Few rows suit the N axis of the tensor cores' instructions, so Wᵀ is the left operand and xᵀ the
right one. mma m16n8k16 multiplies 16 columns of W by 8 rows of x, both from registers. wgmma
m64n(8·n)k16 takes 16 columns of W from each of its four warps' registers, and x from shared memory.
A register of W holds two adjacent rows of one column. It is obtained as follows:

- 16 bits: loaded by `ldmatrix`, which transposes the tile unless it is stored transposed.
- int8: the bytes of the two rows are combined in one register, and exact arithmetic converts them
  to two 16-bit numbers.
- 4 bits: the words of the two rows are combined nibble by nibble. Each byte then has the codes of
  both rows, and is the index into a table of 256 pairs of numbers.
- FP8: each code is looked up in a table.

`few_rows_fragments` describes the elements that lane 4g + t loads, `decode_layout` the sums that
it has.
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

from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.decode.decode_fragments import (
    ROWS,
    STEP,
    TILE_BYTES,
    HalfFragments,
    Int8Fragments,
    ScaledFragments,
    TableFragments,
    TransposedFragments,
    XFragments,
)
from jax_dora.ops.mosaic.decode.decode_layout import from_scalars, layout, to_scalars
from jax_dora.ops.mosaic.hopper import codebook, ptx
from jax_dora.ops.mosaic.hopper.limits import row_transforms
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS
from jax_dora.ops.quantised import bits

# More rows than this times a W of codes are multiplied by wgmma, fewer by each warp's own mma.
MMA_ROWS = 8


def table(numbers: np.ndarray, dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Returns a lookup table u32[256, 32] of pairs of 16-bit numbers, with a column for each lane.

    For 4-bit codes, entry `low | high << 4` has the number of `low` in its lower half and that of
    `high` in its upper half. For 8-bit codes, an entry has the code's number in both halves.

    Args:
      numbers: the 16 or 256 numbers of the codes, which are rounded to `dtype`.
      dtype: bfloat16 or float16.
    """
    numbers = numbers.astype(jnp.dtype(dtype)).view(np.uint16).astype(np.uint32)
    code = np.arange(256)
    low, high = (code & 15, code >> 4) if numbers.size == 16 else (code, code)
    entries = numbers[low] | (numbers[high] << 16)
    return np.repeat(entries[:, None], ptx.LANES, axis=1)


def table_for(w_dtype: Any, dtype: jax.typing.DTypeLike) -> np.ndarray | None:
    """Returns the lookup table for W of `w_dtype`, or None if W needs none."""
    if bits(w_dtype) == 16 or w_dtype == jnp.int8:
        return None
    return table(codebook.numbers(w_dtype), dtype)


def accumulate(
    sums: jax.Array,
    x_smem: Any,
    w_smem: Any,
    table_smem: Any = None,
    scales_smem: Any = None,
    *,
    swizzled_w: bool = True,
    transposed_w: bool = False,
) -> jax.Array:
    """Returns sums + x w, or sums + x (σ∘w).

    Args:
      sums: f32[n, columns], laid out by `layout`.
      x_smem: x [rows, 64]. Either rows = n, a multiple of 8, swizzled by 128 bytes; or rows < 8,
        not swizzled, with n = 8: the last row is then repeated. With more than 64 columns, of which
        the first 64 are used, x is not swizzled.
      w_smem: w [64, columns]. 16-bit w may have fewer columns than sums, a multiple of 8; the sums
        of the missing columns are arbitrary, but finite if the others are.
      table_smem: a `table`, or None if w needs none.
      scales_smem: σ [columns] in x's dtype, or in fp32 if that is bf16; or None. σ∘w is rounded to
        x's dtype. Only for more than 8 rows, and a w of codes.
      swizzled_w: whether w is swizzled, by the bytes of its rows.
      transposed_w: whether w_smem holds wᵀ; w then has 16 bits and 64 columns.
    """
    if choose.interpreted():
        return _interpreted(sums, x_smem, w_smem, table_smem, scales_smem, transposed_w)
    sums_layout = layout(sums.shape[1])
    result = plgpu.ShapeDtypeStruct(sums.shape, jnp.dtype("float32"), layout=sums_layout)
    swizzled_x = x_smem.shape[0] % ROWS == 0 and x_smem.shape[1] == TILE_ROWS
    tiles = [
        plgpu.RefType(row_transforms(ref.shape[1], ref.dtype) if is_swizzled else ())
        for ref, is_swizzled in ((x_smem, swizzled_x), (w_smem, swizzled_w))
    ]
    half = "bf16" if x_smem.dtype == jnp.bfloat16 else "f16"
    dtype, (rows, pitch) = w_smem.dtype, x_smem.shape
    columns = w_smem.shape[1]
    others = {"table": table_smem, "scales": scales_smem}
    others = {name: smem for name, smem in others.items() if smem is not None}
    arg_types = (sums_layout, *tiles, *[plgpu.RefType()] * len(others))

    @plgpu.inline_mgpu(arg_types=arg_types, return_type=result)
    def multiply(_, sums, x_smem, w_smem, *others_smem):
        smem = dict(zip(others, others_smem, strict=True))
        x = XFragments(rows, 0 if swizzled_x else 2 * pitch, x_smem)
        if transposed_w:
            w: Any = TransposedFragments(w_smem)
        elif bits(dtype) == 16:
            w = HalfFragments(columns, swizzled_w, w_smem)
        elif dtype == jnp.int8:
            w = Int8Fragments(half, columns, w_smem)
        else:
            w = TableFragments(columns, bits(dtype), w_smem, smem["table"])
        if scales_smem is not None:
            w = ScaledFragments(w, half, smem["scales"])
        if rows > MMA_ROWS and swizzled_x and bits(dtype) < 16:
            return _accumulate_by_wgmma(half, sums, x_smem, w)
        return _accumulate_by_mma(half, sums, x, w)

    call: Callable[..., Any] = multiply
    return call(sums, x_smem, w_smem, *others.values())


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory for tiles with rows of 128 or 64 bytes, swizzled for `accumulate`."""
    return plgpu.SMEM(shape, dtype, transforms=row_transforms(shape[-1], dtype))


def _interpreted(
    sums: jax.Array,
    x_smem: Any,
    w_smem: Any,
    table_smem: Any,
    scales_smem: Any,
    transposed_w: bool,
) -> jax.Array:
    """Returns `accumulate`'s result, for Pallas' interpreter."""
    x, values = x_smem[...][:, :TILE_ROWS], w_smem[...]
    if transposed_w:
        values = values.T
    if table_smem is not None:
        unsigned = {4: jnp.uint4, 8: jnp.uint8}[bits(values.dtype)]
        codes = lax.bitcast_convert_type(values, unsigned).astype(jnp.int32)
        low = (table_smem[...][:, 0] & 0xFFFF).astype(jnp.uint16)
        values = lax.bitcast_convert_type(low, x.dtype)[codes]
    if scales_smem is not None:
        scales = lax.broadcast_in_dim(scales_smem[...].astype(jnp.float32), values.shape, (1,))
        values = (values.astype(jnp.float32) * scales).astype(x.dtype)
    x = jnp.pad(x, ((0, sums.shape[0] - x.shape[0]), (0, 0)), mode="edge")
    values = jnp.pad(values, ((0, 0), (0, sums.shape[1] - values.shape[1])), mode="edge")
    return sums + jnp.dot(x.astype(jnp.float32), values.astype(jnp.float32), precision="highest")


def _accumulate_by_mma(
    half: str, sums: mgpu.FragmentedArray, x: XFragments, w: Any
) -> mgpu.FragmentedArray:
    """Returns sums plus the product, by mma instructions of each warp."""
    total = to_scalars(sums)
    for step in range(TILE_ROWS // STEP):
        left = w.step(step * STEP)
        for rows in range(len(total)):
            right = [x.numbers(rows, 2 * step + piece) for piece in range(2)]
            for first in range(0, w.word, 2):
                pair = slice(first, first + 2)
                # The sums of two columns of W for two rows of x.
                old = total[rows, :, pair].T
                new = _mma(half, [*left[0][pair], *left[1][pair]], right, list(old.flat))
                total[rows, :, pair] = np.array(new, object).reshape(2, 2).T
    return from_scalars(sums, total)


def _accumulate_by_wgmma(
    half: str, sums: mgpu.FragmentedArray, x_smem: Any, w: Any
) -> mgpu.FragmentedArray:
    """Returns sums plus the product, by wgmma instructions, which read x from shared memory."""
    sums = mgpu.optimization_barrier(sums)
    total = to_scalars(sums)
    count = len(total)
    x = ptx.descriptor(x_smem, TILE_BYTES * ROWS)
    for step in range(TILE_ROWS // STEP):
        left = ptx.pinned([register for part in w.step(step * STEP) for register in part])
        ptx.act("wgmma.fence.sync.aligned;")
        x_step = arith.addi(x, ptx.i64(step * 2 * STEP // 16))
        for first in range(0, w.word, 2):
            pair = slice(first, first + 2)
            registers = [*left[: w.word][pair], *left[w.word :][pair]]
            old = list(total[:, :, pair].transpose(0, 2, 1).flat)
            new = ptx.wgmma(half, registers, x_step, old)
            total[:, :, pair] = np.array(new, object).reshape(count, 2, 2).transpose(0, 2, 1)
        ptx.act("wgmma.commit_group.sync.aligned;")
    ptx.act("wgmma.wait_group.sync.aligned 0;")
    return mgpu.optimization_barrier(from_scalars(sums, total))


def _mma(
    half: str, left: Sequence[ir.Value], right: Sequence[ir.Value], sums: Sequence[ir.Value]
) -> list[ir.Value]:
    """Returns sums plus the product, by one mma m16n8k16."""
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    return ptx.several(ir.F32Type.get(), 4, [*left, *right, *sums], text, constraints)
