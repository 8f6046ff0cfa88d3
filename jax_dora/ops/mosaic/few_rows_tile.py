"""The product of few rows with a tile of a kernel, on tensor cores.

The instruction m16n8k16 takes Wᵀ from registers: 16 columns of W for M, 8 rows of x for N; and so
does a warpgroup's, m64n8·nk16, to which every warp gives 16 columns, and whose x lies in shared
memory. A register holds the numbers of two neighbouring rows of W in one column.

    16 bits  numbers are stored as they are multiplied, and `ldmatrix` transposes them
    int8     the byte of either row is met in one register, and arithmetic that is exact makes
             two numbers of it
    4 bits   of codes two words, one of either row, are met nibble by nibble, and a byte of both is
             the place of such a pair in a table of 256
    FP8      codes are looked up one by one

    word     the columns whose numbers a register holds: 8 of 4 bits, 4 of 8 bits
    lane 4g + t of warp w has of codes the columns from word·(8w + g) on, of 16 bits the columns
    16w + g and 16w + 8 + g; of every 16 rows of W the rows 2t, 2t + 1, 2t + 8 and 2t + 9; of the
    sums the rows 2t and 2t + 1 of every 8 of x
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
from jax_dora.ops.mosaic import codebook, ptx
from jax_dora.ops.mosaic.low_rank_tiling import TILE_ROWS
from jax_dora.ops.quantised import bits

# Bytes of a row of a tile, which the widest swizzle permutes in pieces of 16.
TILE_BYTES = 128
# Rows of x that an instruction takes.
ROWS = 8
STEP = 16
# More rows than these by codes are a warpgroup's product.
WARPS_ROWS = 8


def layout(dtype: Any) -> Any:
    """Returns how the sums f32[8·n, columns] of a tile of `dtype` lie in registers."""
    if bits(dtype) == 16:
        tiles = ((ROWS, 64), (ROWS, 16), (ROWS, 8), (2, 1))
        return plgpu.Layout.TILED(
            plgpu.Tiling(tiles), warp_dims=(-7,), lane_dims=(-3, -4), vector_dim=-1
        )
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


def table_for(stored: Any, dtype: jax.typing.DTypeLike) -> np.ndarray | None:
    """Returns the table that W of dtype `stored` is looked up in, or None."""
    if bits(stored) == 16 or stored == jnp.int8:
        return None
    return table(codebook.numbers(stored), dtype)


def multiplied(
    sums: jax.Array, x_smem: Any, w_smem: Any, table_smem: Any, *, swizzled_w: bool = True
) -> jax.Array:
    """Returns sums + x w for f32[n, columns] laid out by `layout`, x [rows, 64], w [64, columns].

    Of fewer than 8 rows, which lie as they are, n is 8 and the last is repeated. Otherwise there
    are n, a multiple of 8. They, and w unless told otherwise, are laid out with a swizzle of 128
    bytes. x may have more columns, and then no swizzle. W of 16 bits and fewer than 64 columns has
    a multiple of 8, and the further sums are finite where the others are.

    Args:
      table_smem: of `table`, or None where W is no codes that are looked up.
    """
    if choose.interpreted():
        return _as_defined(sums, x_smem, w_smem, table_smem)
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
        x = _X(rows, 0 if swizzled_x else 2 * pitch, x_smem)
        if bits(dtype) == 16:
            w: Any = _Numbers(columns, swizzled_w, w_smem)
        elif dtype == jnp.int8:
            w = _Bytes(half, w_smem)
        else:
            w = _Looked(bits(dtype), w_smem, *table_smem)
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


def store(sums: jax.Array, sums_smem: Any, of: Any) -> None:
    """Writes sums [n, columns] of a tile of dtype `of`, laid out by `layout`, to memory that is not
    swizzled; several lanes want the same bank, which plain assignment refuses."""
    if choose.interpreted():
        sums_smem[...] = sums
        return

    @plgpu.inline_mgpu(arg_types=(layout(of), plgpu.RefType()))
    def write(_, sums, sums_smem):
        sums.store_untiled(sums_smem, optimized=False)

    call: Callable[..., Any] = write
    call(sums, sums_smem)


def read_whole() -> None:
    """Orders what a thread has read in shared memory before what the copy engine writes there once
    the thread has handed it back."""
    if choose.interpreted():
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(_):
        ptx.act("fence.proxy.async.shared::cta;")

    call: Callable[..., Any] = fence
    call()


def _as_defined(sums: jax.Array, x_smem: Any, w_smem: Any, table_smem: Any) -> jax.Array:
    """Computes what `multiplied` does, in the interpreter."""
    x, values = x_smem[...][:, :TILE_ROWS], w_smem[...]
    if table_smem is not None:
        unsigned = {4: jnp.uint4, 8: jnp.uint8}[bits(values.dtype)]
        codes = lax.bitcast_convert_type(values, unsigned).astype(jnp.int32)
        low = (table_smem[...][:, 0] & 0xFFFF).astype(jnp.uint16)
        values = lax.bitcast_convert_type(low, x.dtype)[codes]
    x = jnp.pad(x, ((0, sums.shape[0] - x.shape[0]), (0, 0)), mode="edge")
    values = jnp.pad(values, ((0, 0), (0, sums.shape[1] - values.shape[1])), mode="edge")
    return sums + jnp.dot(x.astype(jnp.float32), values.astype(jnp.float32), precision="highest")


class _X:
    """What a thread reads of x: of each 8 rows, two columns of one.

    Attributes:
      pitch: bytes from row to row.
    """

    def __init__(self, rows: int, pitch: int, x_smem: Any):
        """`pitch` is 0 for a tile of whole swizzled rows."""
        lane = ptx.lane()
        group, at = arith.shrui(lane, ptx.i32(2)), arith.andi(lane, ptx.i32(3))
        row = group if rows % ROWS == 0 else arith.minui(group, ptx.i32(rows - 1))
        self.swizzle = ptx.i32(0) if pitch else arith.shli(group, ptx.i32(4))
        self.pitch = pitch or TILE_BYTES
        place = arith.muli(row, ptx.i32(self.pitch))
        place = arith.addi(place, arith.shli(at, ptx.i32(2)))
        self.x = _at(mgpu.utils.memref_ptr(x_smem), place)

    def numbers(self, rows: int, piece: int) -> ir.Value:
        """Returns the numbers of two columns of a row: of the 16 bytes number `piece`."""
        place = arith.xori(self.swizzle, ptx.i32(16 * piece))
        return _load(_at(self.x, place), rows * ROWS * self.pitch)


class _Numbers:
    """W of 16 bits.

    Attributes:
      word: how many columns a lane has.
    """

    word = 2

    def __init__(self, columns: int, is_swizzled: bool, w_smem: Any):
        pitch = TILE_BYTES if is_swizzled else 2 * columns
        lane = ptx.lane()
        # A lane gives the place of a row of one of four 8 × 8 matrices: row / 8 in its second bit.
        row = arith.addi(
            arith.andi(lane, ptx.i32(7)), arith.shli(arith.shrui(lane, ptx.i32(4)), ptx.i32(3))
        )
        second = arith.andi(arith.shrui(lane, ptx.i32(3)), ptx.i32(1))
        piece = arith.addi(arith.shli(_warp(), ptx.i32(1)), second)
        piece = arith.minui(piece, ptx.i32(columns // 8 - 1))
        if is_swizzled:
            piece = arith.xori(piece, arith.andi(row, ptx.i32(7)))
        place = arith.addi(arith.muli(row, ptx.i32(pitch)), arith.shli(piece, ptx.i32(4)))
        self.address, self.pitch = arith.addi(ptx.address(w_smem), place), pitch

    def step(self, row: int) -> list[list[ir.Value]]:
        """Returns by halves of 16 rows, `row` on, and by columns what a lane has."""
        address = arith.addi(self.address, ptx.i32(row * self.pitch))
        four = ptx.load_transposed(address)
        return [four[:2], four[2:]]


class _Codes:
    """Words of codes in the swizzled tile: of odd rows apart, since a swizzle goes by the row."""

    def __init__(self, word: int, w_smem: Any):
        self.word = word
        lane = ptx.lane()
        group, at = arith.shrui(lane, ptx.i32(2)), arith.andi(lane, ptx.i32(3))
        byte = arith.addi(arith.shli(_warp(), ptx.i32(5)), arith.shli(group, ptx.i32(2)))
        codes = mgpu.utils.memref_ptr(w_smem)
        self.rows = []
        for odd in range(2):
            row = arith.ori(arith.shli(at, ptx.i32(1)), ptx.i32(odd))
            place = arith.xori(byte, arith.shli(row, ptx.i32(4)))
            self.rows.append(_at(codes, arith.addi(arith.shli(row, ptx.i32(7)), place)))

    def step(self, row: int) -> list[list[ir.Value]]:
        """Returns by halves of 16 rows, `row` on, and by columns of a word the numbers of two rows,
        2t on, in one register."""
        return [
            self.numbers(*(_load(one, (row + half) * TILE_BYTES) for one in self.rows))
            for half in (0, STEP // 2)
        ]

    def numbers(self, first: ir.Value, second: ir.Value) -> list[ir.Value]:
        """Returns the numbers of two words."""
        raise NotImplementedError


class _Looked(_Codes):
    """Codes that are looked up in a table.

    Attributes:
      column: the lane's of the table.
    """

    def __init__(self, bits_of_code: int, w_smem: Any, table_smem: Any):
        super().__init__(32 // bits_of_code, w_smem)
        self.column = ptx.lanes_column(table_smem)

    def numbers(self, first: ir.Value, second: ir.Value) -> list[ir.Value]:
        if self.word == 4:
            found = [
                [ptx.entry(self.column, one, byte) for one in (first, second)] for byte in range(4)
            ]
            return [ptx.run("prmt.b32 $0, $1, $2, 0x5410;", *two) for two in found]
        low = ptx.i32(0x0F0F0F0F)
        take = "lop3.b32 $0, $1, $2, $3, 0xE4;"  # Where the third has a bit the first's, or else.
        even = ptx.run(take, first, arith.shli(second, ptx.i32(4)), low)
        odd = ptx.run(take, arith.shrui(first, ptx.i32(4)), second, low)
        return [ptx.entry(self.column, one, byte) for byte in range(4) for one in (even, odd)]


class _Bytes(_Codes):
    """int8. With a byte b = 128·n + m, m below 128, 16 bits 0x4300 + m are 128 + m in bf16, and
    0x4300 + 128·n are 128 or 256: their difference is m - 128·n. In fp16 0x6400 + (b ^ 128) are
    1024 + 128 + the number."""

    def __init__(self, half: str, w_smem: Any):
        super().__init__(4, w_smem)
        self.half = half

    def numbers(self, first: ir.Value, second: ir.Value) -> list[ir.Value]:
        found = []
        for byte in range(4):
            # Every other byte is masked.
            chosen = 0x4400 + 0x1111 * byte
            both = ptx.run(f"prmt.b32 $0, $1, $2, {chosen:#06x};", first, second)
            found.append(self._apart(both))
        return found

    def _apart(self, both: ir.Value) -> ir.Value:
        def masked(mask: int, other: int, table: str) -> ir.Value:
            operands = both, ptx.i32(mask), ptx.i32(other)
            return ptx.run(f"lop3.b32 $0, $1, $2, $3, {table};", *operands)

        if self.half == "bf16":
            low = masked(0x007F007F, 0x43004300, "0xEA")  # (a & b) | c
            high = masked(0x00800080, 0x43004300, "0xEA")
            return ptx.run("sub.rn.bf16x2 $0, $1, $2;", low, high)
        moved = masked(0x00FF00FF, 0x64806480, "0x6A")  # (a & b) ^ c
        return ptx.run("sub.rn.f16x2 $0, $1, $2;", moved, ptx.i32(0x64806480))


def _added(half: str, sums: mgpu.FragmentedArray, x: _X, w: Any) -> mgpu.FragmentedArray:
    """Returns sums plus the product, by each warp's own instructions."""
    total = _taken_apart(sums, w.word)
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
    return _put_together(sums, total)


def _added_by_warpgroup(
    half: str, sums: mgpu.FragmentedArray, x_smem: Any, w: Any
) -> mgpu.FragmentedArray:
    """Returns sums plus the product, by the warpgroup's instructions, which read x themselves."""
    sums = mgpu.optimization_barrier(sums)
    total = _taken_apart(sums, w.word)
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
    return mgpu.optimization_barrier(_put_together(sums, total))


def _taken_apart(sums: mgpu.FragmentedArray, word: int) -> np.ndarray:
    """Returns a thread's sums by [rows of x / 8, row of two, column]."""
    registers = sums.registers
    if word == 2:
        apart = [vector.extract(one, [], [0]) for one in registers.flat]
        return np.array(apart, object).reshape(-1, 2, 2).transpose(0, 2, 1)
    held = registers.reshape(-1, 2, word // 4)
    total = np.empty((len(held), 2, word), object)
    for index in np.ndindex(total.shape):
        vectors = held[index[0], index[1], index[2] // 4]
        total[index] = vector.extract(vectors, [], [index[2] % 4])
    return total


def _put_together(sums: mgpu.FragmentedArray, total: np.ndarray) -> mgpu.FragmentedArray:
    """Reverses `_taken_apart`."""
    if total.shape[2] == 2:
        total = total.transpose(0, 2, 1)
    size = 1 if total.shape[2] == 2 else 4
    vectors = ir.VectorType.get((size,), ir.F32Type.get())
    result = np.empty_like(sums.registers)
    for at, some in enumerate(total.reshape(-1, size)):
        result.flat[at] = vector.from_elements(vectors, list(some))
    return mgpu.FragmentedArray(_registers=result, _layout=sums.layout, _is_signed=None)


def _mma(
    half: str, left: Sequence[ir.Value], right: Sequence[ir.Value], sums: Sequence[ir.Value]
) -> list[ir.Value]:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    return ptx.several(ir.F32Type.get(), 4, [*left, *right, *sums], text, constraints)


def _wgmma(half: str, left: Sequence[ir.Value], x: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
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


def _warp() -> ir.Value:
    """Returns the warp's number in its warpgroup."""
    return arith.andi(arith.shrui(mgpu.utils.thread_idx(), ptx.i32(5)), ptx.i32(3))


def _at(pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
    """Returns a pointer some bytes further on."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def _load(pointer: ir.Value, offset: int) -> ir.Value:
    return llvm.load(ir.IntegerType.get_signless(32), _at(pointer, offset))
