"""Reads of x and of a tile of W by one thread, as tensor cores take them.

word     the columns whose numbers a register holds: 8 of 4 bits, 4 of 8 bits
lane 4g + t of warp w has of codes the columns from word·(8w + g) on, of 16 bits the columns
16w + g and 16w + 8 + g; of every 16 rows of W the rows 2t, 2t + 1, 2t + 8 and 2t + 9, two
neighbours in one register; of every 8 rows of x row g
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jax_dora.ops.mosaic import ptx

# Bytes of a row of a tile, which the widest swizzle permutes in pieces of 16.
TILE_BYTES = 128
# Rows of x, and of W, that an instruction takes.
ROWS = 8
STEP = 16


class X:
    """A thread's reads of x: of each 8 rows, two columns of one.

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
        self.x = ptx.further(mgpu.utils.memref_ptr(x_smem), place)

    def numbers(self, rows: int, piece: int) -> ir.Value:
        """Returns the numbers of two columns of a row: of the 16 bytes number `piece`."""
        place = arith.xori(self.swizzle, ptx.i32(16 * piece))
        return _load(ptx.further(self.x, place), rows * ROWS * self.pitch)


class Numbers:
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
        piece = arith.addi(arith.shli(warp(), ptx.i32(1)), second)
        piece = arith.minui(piece, ptx.i32(columns // 8 - 1))
        if is_swizzled:
            piece = arith.xori(piece, arith.andi(row, ptx.i32(7)))
        place = arith.addi(arith.muli(row, ptx.i32(pitch)), arith.shli(piece, ptx.i32(4)))
        self.address, self.pitch = arith.addi(ptx.address(w_smem), place), pitch

    def step(self, row: int) -> list[list[ir.Value]]:
        """Returns by halves of 16 rows, `row` on, and by columns what a lane has."""
        address = arith.addi(self.address, ptx.i32(row * self.pitch))
        four = ptx.load_matrices(address, transposed=True)
        return [four[:2], four[2:]]


class Transposed:
    """W of 16 bits, [columns, 64]: a column's numbers lie in a swizzled row.

    Attributes:
      word: how many columns a lane has.
    """

    word = 2

    def __init__(self, w_smem: Any):
        lane = ptx.lane()
        # A lane gives the place of a column of one of four 8 × 8 matrices: column / 8 in its first
        # bit, row / 8 in its second.
        group = arith.andi(lane, ptx.i32(7))
        second = arith.andi(lane, ptx.i32(8))
        column = arith.addi(arith.shli(warp(), ptx.i32(4)), arith.addi(group, second))
        place = arith.addi(ptx.address(w_smem), arith.shli(column, ptx.i32(7)))
        piece = arith.xori(arith.shrui(lane, ptx.i32(4)), group)
        self.row, self.piece = place, arith.shli(piece, ptx.i32(4))

    def step(self, row: int) -> list[list[ir.Value]]:
        """Returns by halves of 16 rows, `row` on, and by columns what a lane has."""
        piece = arith.xori(self.piece, ptx.i32(2 * row))
        four = ptx.load_matrices(arith.addi(self.row, piece), transposed=False)
        return [four[:2], four[2:]]


class Codes:
    """Words of codes in the swizzled tile: of odd rows apart, since a swizzle goes by the row."""

    def __init__(self, word: int, w_smem: Any):
        self.word = word
        lane = ptx.lane()
        group, at = arith.shrui(lane, ptx.i32(2)), arith.andi(lane, ptx.i32(3))
        byte = arith.addi(arith.shli(warp(), ptx.i32(5)), arith.shli(group, ptx.i32(2)))
        codes = mgpu.utils.memref_ptr(w_smem)
        self.rows = []
        for odd in range(2):
            row = arith.ori(arith.shli(at, ptx.i32(1)), ptx.i32(odd))
            place = arith.xori(byte, arith.shli(row, ptx.i32(4)))
            self.rows.append(ptx.further(codes, arith.addi(arith.shli(row, ptx.i32(7)), place)))

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


class Looked(Codes):
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


class Bytes(Codes):
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


def warp() -> ir.Value:
    """Returns the warp's number in its warpgroup."""
    return arith.andi(arith.shrui(mgpu.utils.thread_idx(), ptx.i32(5)), ptx.i32(3))


def _load(pointer: ir.Value, offset: int) -> ir.Value:
    return llvm.load(ir.IntegerType.get_signless(32), ptx.further(pointer, offset))
