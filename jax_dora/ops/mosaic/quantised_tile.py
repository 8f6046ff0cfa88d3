"""The product of few rows with a tile of codes, on tensor cores, by a table of numbers.

The instruction m16n8k16 takes Wᵀ from registers: 16 columns of W for M, 8 rows of x for N. A
register holds the numbers of two neighbouring rows of W in one column, so of codes of 4 bits two
words, one of either row, are met nibble by nibble, and a byte of both is the place of such a pair
in a table of 256: no arithmetic, whatever the format. Codes of 8 bits are looked up one by one.

    word     the columns whose codes a register holds: 8 of 4 bits, 4 of 8 bits
    lane 4g + t of warp w has the columns from word·(8w + g) on; of every 16 rows of W the rows 2t,
    2t + 1, 2t + 8 and 2t + 9; of the sums the rows 2t and 2t + 1 of every 8 of x

A weight of 4 bits takes 3/4 of an integer instruction, 5/8 of a load and, for every 8 rows of x,
1/8 of a product.
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
from jaxlib.mlir.dialects import arith, llvm, vector

from jax_dora.ops import choose
from jax_dora.ops.mosaic import ptx
from jax_dora.ops.mosaic.low_rank_tiling import TILE_ROWS
from jax_dora.ops.quantised import bits

# Bytes of a row of a tile, which the widest swizzle permutes in pieces of 16.
TILE_BYTES = 128
# Rows of x that an instruction takes.
ROWS = 8
STEP = 16


def layout(dtype: Any) -> Any:
    """Returns how the sums f32[8·n, columns] of a tile of codes of `dtype` lie in registers."""
    word = 32 // bits(dtype)
    tiles = ((ROWS, 32 * word), (ROWS, 8 * word), (2, word), *[(4,)] * (word > 4))
    behind = word > 4
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles),
        warp_dims=(-5 - behind,),
        lane_dims=(-3 - behind, -4 - behind),
        vector_dim=-1,
    )


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


def multiplied(sums: jax.Array, x_smem: Any, q_smem: Any, table_smem: Any) -> jax.Array:
    """Returns sums + x q for f32[n, columns] laid out by `layout`, x [rows, 64], q [64, columns].

    Of fewer than 8 rows, which lie as they are, n is 8 and the last is repeated. Otherwise there
    are n, a multiple of 8; they, as q, are laid out with a swizzle of 128 bytes.
    """
    if choose.interpreted():
        return _as_defined(sums, x_smem, q_smem, table_smem)
    of_codes = layout(q_smem.dtype)
    of_x = _transforms(x_smem.dtype) if x_smem.shape[0] % ROWS == 0 else ()
    found = plgpu.ShapeDtypeStruct(sums.shape, jnp.dtype("float32"), layout=of_codes)
    tiles = plgpu.RefType(of_x), plgpu.RefType(_transforms(q_smem.dtype))
    half = "bf16" if x_smem.dtype == jnp.bfloat16 else "f16"
    bits_of_code, rows = bits(q_smem.dtype), x_smem.shape[0]

    @plgpu.inline_mgpu(arg_types=(of_codes, *tiles, plgpu.RefType()), return_type=found)
    def multiply(_, sums, x_smem, q_smem, table_smem):
        return _Product(half, bits_of_code, rows, x_smem, q_smem, table_smem).added(sums)

    call: Callable[..., Any] = multiply
    return call(sums, x_smem, q_smem, table_smem)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory for tiles of 128 bytes a row, as `multiplied` reads them."""
    return plgpu.SMEM(shape, dtype, transforms=_transforms(dtype))


def _transforms(dtype: Any) -> tuple[Any, ...]:
    tiling = plgpu.TilingTransform((8, 8 * TILE_BYTES // bits(dtype)))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(TILE_BYTES)  # pyright: ignore[reportAbstractUsage]


def store(sums: jax.Array, sums_smem: Any, dtype: Any) -> None:
    """Writes sums [n, columns] of codes of `dtype`, laid out by `layout`, to memory that is not
    swizzled; several lanes want the same bank, which plain assignment refuses."""
    if choose.interpreted():
        sums_smem[...] = sums
        return

    @plgpu.inline_mgpu(arg_types=(layout(dtype), plgpu.RefType()))
    def write(_, sums, sums_smem):
        sums.store_untiled(sums_smem, optimized=False)

    call: Callable[..., Any] = write
    call(sums, sums_smem)


def _as_defined(sums: jax.Array, x_smem: Any, q_smem: Any, table_smem: Any) -> jax.Array:
    """Computes what `multiplied` does, in the interpreter."""
    x, codes = x_smem[...], q_smem[...]
    unsigned = {4: jnp.uint4, 8: jnp.uint8}[bits(codes.dtype)]
    codes = lax.bitcast_convert_type(codes, unsigned).astype(jnp.int32)
    low = (table_smem[...][:, 0] & 0xFFFF).astype(jnp.uint16)
    values = lax.bitcast_convert_type(low, x.dtype)[codes]
    x = jnp.pad(x, ((0, sums.shape[0] - x.shape[0]), (0, 0)), mode="edge")
    return sums + jnp.dot(x.astype(jnp.float32), values.astype(jnp.float32), precision="highest")


class _Product:
    """One thread's part of a product.

    Attributes:
      x, q: pointers to what the thread reads of either tile; of q's odd rows apart, since a
        swizzle goes by the row.
      column: the lane's of the table.
    """

    def __init__(
        self, half: str, bits_of_code: int, rows: int, x_smem: Any, q_smem: Any, table_smem: Any
    ):
        self.half, self.bits = half, bits_of_code
        self.word = 32 // bits_of_code
        thread, lane = mgpu.utils.thread_idx(), ptx.lane()
        group, at = arith.shrui(lane, ptx.i32(2)), arith.andi(lane, ptx.i32(3))
        is_whole = rows % ROWS == 0
        row = group if is_whole else arith.minui(group, ptx.i32(rows - 1))
        place = arith.addi(arith.shli(row, ptx.i32(7)), arith.shli(at, ptx.i32(2)))
        self.x = _at(mgpu.utils.memref_ptr(x_smem), place)
        self.swizzle = arith.shli(group, ptx.i32(4)) if is_whole else ptx.i32(0)
        warp = arith.andi(arith.shrui(thread, ptx.i32(5)), ptx.i32(3))
        byte = arith.addi(arith.shli(warp, ptx.i32(5)), arith.shli(group, ptx.i32(2)))
        q = mgpu.utils.memref_ptr(q_smem)
        self.q = []
        for odd in range(2):
            row = arith.ori(arith.shli(at, ptx.i32(1)), ptx.i32(odd))
            place = arith.xori(byte, arith.shli(row, ptx.i32(4)))
            self.q.append(_at(q, arith.addi(arith.shli(row, ptx.i32(7)), place)))
        self.column = ptx.lanes_column(table_smem)

    def added(self, sums: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """Returns sums plus the product."""
        f32 = ir.F32Type.get()
        # [rows of x / 8, row of two, column]
        held = sums.registers.reshape(-1, 2, self.word // 4)
        total = np.empty((len(held), 2, self.word), object)
        for index in np.ndindex(total.shape):
            vectors = held[index[0], index[1], index[2] // 4]
            total[index] = vector.extract(vectors, [], [index[2] % 4])
        for step in range(TILE_ROWS // STEP):
            left = [self._numbers(step * STEP + half) for half in (0, STEP // 2)]
            for rows in range(len(total)):
                right = [self._x(rows, 2 * step + half) for half in range(2)]
                for first in range(0, self.word, 2):
                    pair = slice(first, first + 2)
                    four = [*left[0][pair], *left[1][pair]]
                    # Two columns' sums for two rows of x.
                    into = total[rows, :, pair].T
                    found = self._mma(four, right, list(into.flat))
                    total[rows, :, pair] = np.array(found, object).reshape(2, 2).T
        result = np.empty_like(sums.registers)
        of_four = ir.VectorType.get((4,), f32)
        for at, four in enumerate(total.reshape(-1, 4)):
            result.flat[at] = vector.from_elements(of_four, list(four))
        return mgpu.FragmentedArray(_registers=result, _layout=sums.layout, _is_signed=None)

    def _numbers(self, row: int) -> list[ir.Value]:
        """Returns for each column of a word the numbers of two rows, `row` + 2t on, in one
        register."""
        first, second = (_load(one, row * TILE_BYTES) for one in self.q)
        if self.bits == 8:
            found = [
                [ptx.entry(self.column, one, byte) for one in (first, second)] for byte in range(4)
            ]
            return [ptx.run("prmt.b32 $0, $1, $2, 0x5410;", *two) for two in found]
        low = ptx.i32(0x0F0F0F0F)
        take = "lop3.b32 $0, $1, $2, $3, 0xE4;"  # Where the third has a bit the first's, or else.
        even = ptx.run(take, first, arith.shli(second, ptx.i32(4)), low)
        odd = ptx.run(take, arith.shrui(first, ptx.i32(4)), second, low)
        return [ptx.entry(self.column, one, byte) for byte in range(4) for one in (even, odd)]

    def _x(self, rows: int, piece: int) -> ir.Value:
        """Returns the numbers of two columns of a row of x: of the 16 bytes number `piece`."""
        place = arith.xori(self.swizzle, ptx.i32(16 * piece))
        return _load(_at(self.x, place), rows * ROWS * TILE_BYTES)

    def _mma(
        self, left: Sequence[ir.Value], right: Sequence[ir.Value], sums: Sequence[ir.Value]
    ) -> list[ir.Value]:
        f32 = ir.F32Type.get()
        half = self.half
        text = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
        )
        constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
        struct = llvm.StructType.get_literal([f32] * 4)
        found = llvm.inline_asm(struct, [*left, *right, *sums], text, constraints)
        return [llvm.extractvalue(f32, found, [i]) for i in range(4)]


def _at(pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
    """Returns a pointer some bytes further on."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def _load(pointer: ir.Value, offset: int) -> ir.Value:
    return llvm.load(ir.IntegerType.get_signless(32), _at(pointer, offset))
