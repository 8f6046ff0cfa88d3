"""The fragments of x and of a tile of W: the elements that one thread gives to the tensor cores.

Lane 4g + t of warp w has

- of every 8 rows of x: row g.
- of every 16 rows of W: rows 2t and 2t + 1 in one register, rows 2t + 8 and 2t + 9 in another.
- of the columns of W: for codes `word` columns from word·(8w + g) on, where the tile has 32·word
  columns; for 16-bit numbers columns 16w + g and 16w + 8 + g.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jax_dora.ops.mosaic.hopper import ptx

# The bytes of a row of most tiles. The swizzle of 128 bytes permutes its 8 pieces of 16 bytes.
TILE_BYTES = 128
# The rows of x, and of W, of one instruction.
ROWS = 8
STEP = 16


class XFragments:
    """The fragments of x: two adjacent columns of one row of every 8 rows, in a register.

    Attributes:
      pitch: the bytes from row to row.
    """

    def __init__(self, rows: int, pitch: int, x_smem: Any):
        """Computes the lane's addresses; `pitch` is 0 if x is swizzled."""
        lane = ptx.lane()
        g, t = arith.shrui(lane, ptx.i32(2)), arith.andi(lane, ptx.i32(3))
        row = g if rows % ROWS == 0 else arith.minui(g, ptx.i32(rows - 1))
        self.swizzle = ptx.i32(0) if pitch else arith.shli(g, ptx.i32(4))
        self.pitch = pitch or TILE_BYTES
        offset = arith.muli(row, ptx.i32(self.pitch))
        offset = arith.addi(offset, arith.shli(t, ptx.i32(2)))
        self.x = ptx.further(mgpu.utils.memref_ptr(x_smem), offset)

    def numbers(self, rows: int, piece: int) -> ir.Value:
        """Returns two columns of the lane's row, from the row's 16 bytes number `piece`.

        Args:
          rows: which 8 rows of x.
          piece: which 8 columns of x.
        """
        offset = arith.xori(self.swizzle, ptx.i32(16 * piece))
        return _load(ptx.further(self.x, offset), rows * ROWS * self.pitch)


class HalfFragments:
    """The fragments of a 16-bit W.

    Attributes:
      word: the number of columns of a lane.
    """

    word = 2

    def __init__(self, columns: int, is_swizzled: bool, w_smem: Any):
        pitch = TILE_BYTES if is_swizzled else 2 * columns
        lane = ptx.lane()
        # For `ldmatrix`, lane 8m + i gives the address of row i of 8 × 8 matrix m. Matrices 2 and 3
        # are rows 8 to 15 of W; matrices 1 and 3 are the second 8 columns.
        row = arith.addi(
            arith.andi(lane, ptx.i32(7)), arith.shli(arith.shrui(lane, ptx.i32(4)), ptx.i32(3))
        )
        second = arith.andi(arith.shrui(lane, ptx.i32(3)), ptx.i32(1))
        piece = arith.addi(arith.shli(warp(), ptx.i32(1)), second)
        piece = arith.minui(piece, ptx.i32(columns // 8 - 1))
        if is_swizzled:
            piece = arith.xori(piece, arith.andi(row, ptx.i32(7)))
        offset = arith.addi(arith.muli(row, ptx.i32(pitch)), arith.shli(piece, ptx.i32(4)))
        self.address, self.pitch = arith.addi(ptx.address(w_smem), offset), pitch

    def step(self, row: int) -> list[list[ir.Value]]:
        """Returns registers [8 rows, column] for rows `row` to `row + 16`."""
        address = arith.addi(self.address, ptx.i32(row * self.pitch))
        registers = ptx.load_matrices(address, transposed=True)
        return [registers[:2], registers[2:]]


class TransposedFragments:
    """The fragments of a 16-bit W that is stored transposed, [columns, 64], and swizzled.

    Attributes:
      word: the number of columns of a lane.
    """

    word = 2

    def __init__(self, w_smem: Any):
        lane = ptx.lane()
        # For `ldmatrix`, lane 8m + i gives the address of column i of 8 × 8 matrix m. Matrices 1
        # and 3 are the second 8 columns of W; matrices 2 and 3 are rows 8 to 15.
        index = arith.andi(lane, ptx.i32(7))
        second = arith.andi(lane, ptx.i32(8))
        column = arith.addi(arith.shli(warp(), ptx.i32(4)), arith.addi(index, second))
        address = arith.addi(ptx.address(w_smem), arith.shli(column, ptx.i32(7)))
        piece = arith.xori(arith.shrui(lane, ptx.i32(4)), index)
        self.address, self.piece = address, arith.shli(piece, ptx.i32(4))

    def step(self, row: int) -> list[list[ir.Value]]:
        """Returns registers [8 rows, column] for rows `row` to `row + 16`."""
        piece = arith.xori(self.piece, ptx.i32(2 * row))
        registers = ptx.load_matrices(arith.addi(self.address, piece), transposed=False)
        return [registers[:2], registers[2:]]


class CodeFragments:
    """The fragments of a W of codes: the base class of those that convert codes to numbers.

    Attributes:
      word: the number of columns of a lane.
      pitch: the bytes of a row of the tile: 128, or 64 for 4-bit codes of 128 columns.
      rows: the addresses of the lane's codes in rows 2t and 2t + 1; the swizzle depends on the row.
    """

    def __init__(self, columns: int, bits_of_code: int, w_smem: Any):
        self.word, self.pitch = columns // ptx.LANES, columns * bits_of_code // 8
        lane = ptx.lane()
        g, t = arith.shrui(lane, ptx.i32(2)), arith.andi(lane, ptx.i32(3))
        lane_bytes = self.pitch // ptx.LANES
        byte = _share(g, lane_bytes)
        codes = mgpu.utils.memref_ptr(w_smem)
        self.rows = []
        for odd in range(2):
            row = arith.ori(arith.shli(t, ptx.i32(1)), ptx.i32(odd))
            # The swizzle of 64 bytes permutes 4 pieces of 16 bytes, the same way in two rows.
            piece = row if self.pitch == TILE_BYTES else t
            offset = arith.xori(byte, arith.shli(piece, ptx.i32(4)))
            offset = arith.addi(arith.muli(row, ptx.i32(self.pitch)), offset)
            self.rows.append(ptx.further(codes, offset))

    def step(self, row: int) -> list[list[ir.Value]]:
        """Returns registers [8 rows, column] for rows `row` to `row + 16`."""
        words = [
            [self._load(address, row + offset) for address in self.rows]
            for offset in (0, STEP // 2)
        ]
        if self.pitch == TILE_BYTES:
            return [self.numbers(*pair) for pair in words]
        # Two pairs of half words make one pair of words.
        join = "prmt.b32 $0, $1, $2, 0x5410;"
        registers = self.numbers(*(ptx.run(join, *halves) for halves in zip(*words, strict=True)))
        return [registers[: self.word], registers[self.word :]]

    def numbers(self, first: ir.Value, second: ir.Value) -> list[ir.Value]:
        """Returns, for each column, the numbers of the codes in the words of two adjacent rows."""
        raise NotImplementedError

    def _load(self, address: ir.Value, row: int) -> ir.Value:
        """Returns the lane's codes in a row, 32 or 16 bits."""
        if self.pitch == TILE_BYTES:
            return _load(address, row * self.pitch)
        half = ir.IntegerType.get_signless(16)
        codes = llvm.load(half, ptx.further(address, row * self.pitch))
        return arith.extui(ir.IntegerType.get_signless(32), codes)


class TableFragments(CodeFragments):
    """The fragments of a W of codes that are looked up in a `decode_tile.table`.

    Attributes:
      column: the address of the lane's column of the table.
      packed: whether a byte has two codes.
    """

    def __init__(self, columns: int, bits_of_code: int, w_smem: Any, table_smem: Any):
        super().__init__(columns, bits_of_code, w_smem)
        self.column = ptx.lanes_column(table_smem)
        self.packed = bits_of_code == 4

    def numbers(self, first: ir.Value, second: ir.Value) -> list[ir.Value]:
        if not self.packed:
            pairs = [
                [ptx.entry(self.column, codes, byte) for codes in (first, second)]
                for byte in range(4)
            ]
            return [ptx.run("prmt.b32 $0, $1, $2, 0x5410;", *pair) for pair in pairs]
        low = ptx.i32(0x0F0F0F0F)
        select = "lop3.b32 $0, $1, $2, $3, 0xE4;"  # bits of $1 where $3 is set, else of $2
        even = ptx.run(select, first, arith.shli(second, ptx.i32(4)), low)
        odd = ptx.run(select, arith.shrui(first, ptx.i32(4)), second, low)
        return [ptx.entry(self.column, codes, byte) for byte in range(4) for codes in (even, odd)]


class Int8Fragments(CodeFragments):
    """The fragments of an int8 W.

    A byte b = 128·n + m with m < 128 stands for m - 128·n. In bf16, the bits 0x4300 + m are the
    number 128 + m, and 0x4300 + 128·n are 128 + 128·n; their difference is exact. In fp16,
    the bits 0x6400 + (b ^ 128) are 1024 + 128 + m - 128·n.
    """

    def __init__(self, half: str, columns: int, w_smem: Any):
        super().__init__(columns, 8, w_smem)
        self.half = half

    def numbers(self, first: ir.Value, second: ir.Value) -> list[ir.Value]:
        registers = []
        for byte in range(4):
            # Combines this byte of `first` and of `second`, in the lower bytes of both halves. The
            # upper bytes are masked out later.
            selector = 0x4400 + 0x1111 * byte
            both = ptx.run(f"prmt.b32 $0, $1, $2, {selector:#06x};", first, second)
            registers.append(self._convert(both))
        return registers

    def _convert(self, both: ir.Value) -> ir.Value:
        """Returns two 16-bit floats for the lower bytes of both halves of a register."""

        def masked(mask: int, other: int, table: str) -> ir.Value:
            operands = both, ptx.i32(mask), ptx.i32(other)
            return ptx.run(f"lop3.b32 $0, $1, $2, $3, {table};", *operands)

        if self.half == "bf16":
            low = masked(0x007F007F, 0x43004300, "0xEA")  # (a & b) | c
            high = masked(0x00800080, 0x43004300, "0xEA")
            return ptx.run("sub.rn.bf16x2 $0, $1, $2;", low, high)
        biased = masked(0x00FF00FF, 0x64806480, "0x6A")  # (a & b) ^ c
        return ptx.run("sub.rn.f16x2 $0, $1, $2;", biased, ptx.i32(0x64806480))


class ScaledFragments:
    """The fragments of σ∘w, rounded to 16 bits, for the fragments of a w of codes.

    σ in fp32 is split into two 16-bit numbers. Their products with w are added with one rounding,
    so that σ is not rounded first.

    Attributes:
      word: the number of columns of a lane.
      parts: the parts of σ for each of these columns, twice in a register.
    """

    def __init__(self, w: CodeFragments, half: str, scales_smem: Any):
        self.word, self._w, self._half = w.word, w, half
        kind = ir.BF16Type.get() if half == "bf16" else ir.F16Type.get()
        stored = ir.MemRefType(scales_smem.type).element_type
        column = _share(arith.shrui(ptx.lane(), ptx.i32(2)), w.word)
        is_wide = isinstance(stored, ir.F32Type)
        item = 4 if is_wide else 2
        start = mgpu.utils.memref_ptr(scales_smem)
        start = ptx.further(start, arith.muli(column, ptx.i32(item)))
        scales = [llvm.load(stored, ptx.further(start, item * n)) for n in range(w.word)]
        if is_wide:
            first = [arith.truncf(kind, scale) for scale in scales]
            left = [
                arith.subf(scale, arith.extf(stored, part))
                for scale, part in zip(scales, first, strict=True)
            ]
            parts = [first, [arith.truncf(kind, scale) for scale in left]]
        else:
            parts = [scales]
        self.parts = [[_twice(kind, number) for number in part] for part in parts]

    def step(self, row: int) -> list[list[ir.Value]]:
        """Returns registers [8 rows, column] for rows `row` to `row + 16`."""
        return [
            [self._scaled(pair, column) for column, pair in enumerate(registers)]
            for registers in self._w.step(row)
        ]

    def _scaled(self, pair: ir.Value, column: int) -> ir.Value:
        first, *others = (part[column] for part in self.parts)
        multiply, multiply_add = (
            f"{name}.rn.{self._half}x2 $0, $1, $2{more};"
            for name, more in (("mul", ""), ("fma", ", $3"))
        )
        if not others:
            return ptx.run(multiply, pair, first)
        return ptx.run(multiply_add, pair, first, ptx.run(multiply, pair, *others))


def _share(g: ir.Value, size: int) -> ir.Value:
    """Returns where the share of lane 4g + t begins, if each g of each warp has `size` elements."""
    place = arith.addi(arith.muli(warp(), ptx.i32(8)), g)
    return arith.muli(place, ptx.i32(size))


def _twice(kind: ir.Type, number: ir.Value) -> ir.Value:
    """Returns a register with a 16-bit number in both halves."""
    both = vector.from_elements(ir.VectorType.get((2,), kind), [number, number])
    return llvm.bitcast(ir.IntegerType.get_signless(32), both)


def warp() -> ir.Value:
    """Returns the index of the thread's warp in its warpgroup."""
    return arith.andi(arith.shrui(mgpu.utils.thread_idx(), ptx.i32(5)), ptx.i32(3))


def _load(pointer: ir.Value, offset: int) -> ir.Value:
    """Returns the 32 bits at `pointer` plus `offset` bytes."""
    return llvm.load(ir.IntegerType.get_signless(32), ptx.further(pointer, offset))
