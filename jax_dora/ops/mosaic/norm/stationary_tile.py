"""The arithmetic of one consumer of `stationary_norm`: its columns of B, products, and squares.

A warpgroup's instruction m64n64k16 takes its left operand from registers. Row m of that operand is
a column of B; column n of the right operand is a row of A. Lane 4g + t of warp w holds, of every
left operand and product, the rows m = 16w + g and 16w + g + 8, and of every 8 columns n of a
product the columns 2t and 2t + 1. The rows m stand for the neighbouring columns 16w + 2g and
16w + 2g + 1 of the matrix, so that one load from a tile of W gets the numbers of both.

In the interpreter, columns are in their natural order, and each function computes its definition.
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

from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.hopper import codebook, ptx
from jax_dora.ops.mosaic.hopper.limits import TILE_K, row_transforms
from jax_dora.ops.mosaic.projection.strip_tiling import TILE_ROWS
from jax_dora.ops.quantised import bits

# The columns of a consumer, which are the rows of one instruction.
COLUMNS = 64
# The rows of A, and the numbers along k, of one core matrix, and along k of one instruction.
EIGHT = 8
STEP = 16
# Copies of the table of pairs: lanes that read different copies never want the same bank.
COPIES = 8
TABLE_BYTES = 256 * 2 * COPIES * 4
# `Layout.WGMMA` with one number in each register: pairs would be taken apart between products.
PRODUCT = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)


def tiles(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory for tiles [..., rows, columns] whose rows are swizzled."""
    return plgpu.SMEM(shape, dtype, transforms=row_transforms(shape[-1], dtype))


def table(dtype: Any) -> np.ndarray:
    """Returns a lookup table f32[256, 2 · COPIES]: for every byte of two 4-bit codes, copies of the
    numbers of the lower and the upper code."""
    numbers, pair = codebook.numbers(dtype), np.arange(256)
    return np.tile(np.stack([numbers[pair & 15], numbers[pair >> 4]], axis=1), COPIES)


def zeros() -> jax.Array:
    """Returns the initial sums, f32[64, 8]: eight sums for each column, each over every eighth
    row."""
    return plgpu.layout_cast(jnp.zeros((COLUMNS, EIGHT), jnp.float32), PRODUCT)


def load_columns(b_smem: Any) -> jax.Array:
    """Loads a consumer's columns of B, [n, 64, 64], and returns Bᵀ [64, 64·n] in registers."""
    slices = b_smem.shape[0]
    if choose.interpreted():
        return b_smem[...].reshape(-1, COLUMNS).T
    shape = (COLUMNS, slices * TILE_K)
    found = plgpu.ShapeDtypeStruct(shape, b_smem.dtype, layout=plgpu.Layout.WGMMA)
    of_b = plgpu.RefType(row_transforms(COLUMNS, b_smem.dtype))

    @plgpu.inline_mgpu(arg_types=(of_b,), return_type=found)
    def load(_, b_smem):
        pairs = _Pairs(b_smem, 16, COLUMNS)
        words = []
        for eight in range(shape[1] // EIGHT):
            two = [pairs.load(eight, odd) for odd in range(2)]
            for halves in ("0x5410", "0x7632"):
                words.append(ptx.run(f"prmt.b32 $0, $1, $2, {halves};", *two))
        kind = ir.VectorType.get((2,), ir.MemRefType(b_smem.type).element_type)
        registers = np.array([mgpu.utils.bitcast(one, kind) for one in ptx.pinned(words)], object)
        layout = plgpu.Layout.WGMMA.to_mgpu()
        registers = registers.reshape(layout.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    call: Callable[..., Any] = load
    return call(b_smem)


def in_order_of_codes(lora_a: jax.Array) -> jax.Array:
    """Returns the rows of A [in, k] such that a thread, whose products are those of the columns 2t
    and 2t + 1 of every 8, gets those of 16 adjacent rows of W: it can then write their codes, which
    it reads for the squares, as 16 adjacent bytes of Wᵀ.

    Its n-th product is that of row 16t + (n xor 2t) of the tile. Without the xor, the lanes of a
    load would read rows that are 16 apart, whose swizzle is the same, from the same banks.
    """
    if choose.interpreted():
        return lora_a
    eight, t, odd = np.meshgrid(np.arange(8), np.arange(4), np.arange(2), indexing="ij")
    order = 16 * t + ((2 * eight + odd) ^ (2 * t))
    tiles = lora_a.reshape(-1, TILE_ROWS, lora_a.shape[1])
    return tiles[:, order.reshape(-1)].reshape(lora_a.shape)


def steps(rank: int) -> tuple[int, ...]:
    """Returns the instructions of each slice of a piece of an adapter whose numbers along k are not
    all padding."""
    starts = range(0, rank, TILE_K)
    return tuple(-(-min(rank - start, TILE_K) // STEP) for start in starts)


def start_product(
    b: jax.Array, a_smem: Any, products: Sequence[Sequence[int]], steps: Sequence[int]
) -> jax.Array:
    """Starts a product, and returns (A B)ᵀ f32[64, 64], which only `wait` may read.

    Args:
      b: Bᵀ [64, 64·n].
      a_smem: a tile of A, [n, 64, 64], by slice, row and k.
      products: for each slice of A the slices of B that it multiplies.
      steps: what `steps` returned.
    """
    if choose.interpreted():
        a, b = a_smem[...].astype(jnp.float32), b.astype(jnp.float32)
        plgpu.commit_smem()  # This is an ordinary read, unlike that of a product.
        total = jnp.zeros((COLUMNS, TILE_ROWS), jnp.float32)
        for k, partners in enumerate(products):
            width = STEP * steps[k % len(steps)]
            for p in partners:
                columns = b[:, p * TILE_K : p * TILE_K + width]
                total = total + jnp.dot(columns, a[k, :, :width].T, precision="highest")
        return total
    found = plgpu.ShapeDtypeStruct((COLUMNS, TILE_ROWS), jnp.dtype("float32"), layout=PRODUCT)
    half = "bf16" if b.dtype == jnp.bfloat16 else "f16"
    of_a = plgpu.RefType(row_transforms(TILE_K, b.dtype))

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, of_a), return_type=found)
    def start(_, b, a_smem):
        words = [mgpu.utils.bitcast(one, ptx.i32(0).type) for one in b.registers.flat]
        a = ptx.descriptor(a_smem, 2 * TILE_K * EIGHT)
        f32 = ir.F32Type.get()
        sums: list[ir.Value] = [arith.constant(f32, ir.FloatAttr.get(f32, 0.0))] * (TILE_ROWS // 2)
        is_first = True
        ptx.act("wgmma.fence.sync.aligned;")
        for k, partners in enumerate(products):
            for p in partners:
                for step in range(steps[k % len(steps)]):
                    four = words[4 * (p * TILE_K // STEP + step) :][:4]
                    place = 2 * (k * TILE_ROWS * TILE_K + step * STEP)
                    at = arith.addi(a, ptx.i64(place // 16))
                    sums = ptx.wgmma(half, four, at, sums, add=not is_first)
                    is_first = False
        ptx.act("wgmma.commit_group.sync.aligned;")
        return _array(sums)

    call: Callable[..., Any] = start
    return call(b, a_smem)


def wait(product: jax.Array) -> jax.Array:
    """Waits until a started product is complete, and returns it."""
    if choose.interpreted():
        return product
    found = plgpu.ShapeDtypeStruct(product.shape, product.dtype, layout=PRODUCT)

    @plgpu.inline_mgpu(arg_types=(PRODUCT,), return_type=found)
    def complete(_, product):
        ptx.act("wgmma.wait_group.sync.aligned 0;")
        return mgpu.optimization_barrier(product)

    call: Callable[..., Any] = complete
    return call(product)


def load_scales(scales_gmem: Any) -> jax.Array:
    """Returns the scales [64] of a tile's columns as f32[64, 8], the same in each row."""
    if choose.interpreted():
        return lax.broadcast_in_dim(scales_gmem[...].astype(jnp.float32), (COLUMNS, EIGHT), (0,))
    found = plgpu.ShapeDtypeStruct((COLUMNS, EIGHT), jnp.dtype("float32"), layout=PRODUCT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=found)
    def load(_, scales_gmem):
        element = ir.MemRefType(scales_gmem.type).element_type
        size = mgpu.utils.bytewidth(element)
        offset = arith.muli(_first_column(COLUMNS), ptx.i32(size))
        place = ptx.further(mgpu.utils.memref_ptr(scales_gmem), offset)
        two = llvm.load(ir.VectorType.get((2,), element), place)
        of_columns = [vector.extract(two, [], [column]) for column in range(2)]
        if size < 4:
            of_columns = [arith.extf(ir.F32Type.get(), one) for one in of_columns]
        return _array([one for one in of_columns for _ in range(2)])

    call: Callable[..., Any] = load
    return call(scales_gmem)


def add_squares(
    sums: jax.Array,
    product: jax.Array,
    w_smem: Any,
    s: jax.Array,
    factors: Sequence[jax.Array],
    table_smem: Any,
    consumer: jax.Array,
    turned_gmem: Any = None,
) -> jax.Array:
    """Returns sums f32[64, 8] + Σ (factors∘v(w) + s·product)², each sum over every eighth row.

    Args:
      product: f32[64, 64], by column and row.
      w_smem: [64, 64·n], by row and column: the columns of this consumer, or of several.
      s: f32[].
      factors: what `load_scales` returned, or nothing.
      table_smem: `table` for 4-bit codes, or None.
      consumer: the number of this consumer among those of `w_smem`.
      turned_gmem: where to write this consumer's 8-bit codes [64, 64], by column and row, or None.
        The rows of A, and so of `product`, are then `in_order_of_codes`.
    """
    dtype, columns = w_smem.dtype, w_smem.shape[1]
    if choose.interpreted():
        values = w_smem[...]
        if columns > COLUMNS:
            values = lax.dynamic_slice_in_dim(values, consumer * COLUMNS, COLUMNS, axis=1)
        if turned_gmem is not None:
            turned_gmem[...] = values.T
        if table_smem is not None:
            codes = lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.int32)
            values = table_smem[...][:16, 0][codes]
        values = values.astype(jnp.float32).T
        for one in factors:
            values = values * one[:, :1]
        squares = jnp.square(values + s * product)
        return sums + squares.reshape(COLUMNS, -1, EIGHT).sum(axis=1)
    found = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=PRODUCT)
    tables = [] if table_smem is None else [table_smem]
    types = (
        *(PRODUCT, PRODUCT, plgpu.RefType(row_transforms(columns, dtype)), plgpu.Layout.WG_SPLAT),
        *[PRODUCT] * len(factors),
        *[plgpu.RefType()] * len(tables),
        *[plgpu.RefType()] * (turned_gmem is not None),
    )

    @plgpu.inline_mgpu(arg_types=types, return_type=found)
    def add(_, sums, product, w_smem, s, *rest):
        factors_of, rest = [_scalars(one) for one in rest[: len(factors)]], rest[len(factors) :]
        (s,) = s.registers.flat
        if turned_gmem is None:
            pairs = _Pairs(w_smem, bits(dtype), columns)
        else:
            pairs = _AdjacentPairs(w_smem, columns)
        numbers = _reader(dtype, *rest[: len(tables)])
        low_rank = np.array(_scalars(product), object).reshape(-1, 2, 2)
        total: list[Any] = [None] * 4
        loaded = []
        for eight, odd in np.ndindex(len(low_rank), 2):
            loaded.append(pairs.load(eight, odd))
            for column, value in enumerate(numbers(loaded[-1])):
                at = 2 * column + odd
                adapted = low_rank[eight, column, odd]
                if factors_of:
                    v = llvm.intr_fma(value, factors_of[0][at], arith.mulf(adapted, s))
                else:
                    v = llvm.intr_fma(adapted, s, value)
                before = total[at]
                total[at] = arith.mulf(v, v) if before is None else llvm.intr_fma(v, v, before)
        if turned_gmem is not None:
            _store_turned(loaded, rest[-1])
        return _array([arith.addf(*two) for two in zip(_scalars(sums), total, strict=True)])

    call: Callable[..., Any] = add
    turned = [] if turned_gmem is None else [turned_gmem]
    return call(sums, product, w_smem, s, *factors, *tables, *turned)


def store(sums: jax.Array, gmem: Any) -> None:
    """Writes the sums over all rows to f32[64] in global memory."""
    if choose.interpreted():
        gmem[...] = sums.sum(axis=1)
        return

    @plgpu.inline_mgpu(arg_types=(PRODUCT, plgpu.RefType()))
    def write(_, sums, gmem):
        four = _scalars(sums)
        two = [arith.addf(*four[at : at + 2]) for at in (0, 2)]
        for distance in (1, 2):
            two = [arith.addf(one, mgpu.utils.shfl_bfly(one, distance)) for one in two]
        offset = arith.muli(_first_column(COLUMNS), ptx.i32(4))
        is_first = arith.subi(ptx.i32(1), arith.andi(ptx.lane(), ptx.i32(3)))
        ptx.store_if_positive(is_first, ptx.further(mgpu.utils.memref_ptr(gmem), offset), two)

    call: Callable[..., Any] = write
    call(sums, gmem)


class _Pairs:
    """Loads the numbers of a thread's two columns from a tile [64·n, columns] of `tiles`."""

    def __init__(self, smem: Any, width: int, columns: int):
        """`width` is the number of bits of a number."""
        pitch = columns * width // 8
        column = arith.shrui(arith.muli(_first_column(columns), ptx.i32(width)), ptx.i32(3))
        twice = arith.shli(arith.andi(ptx.lane(), ptx.i32(3)), ptx.i32(1))
        self._rows = []
        for odd in range(2):
            row = arith.muli(arith.addi(twice, ptx.i32(odd)), ptx.i32(pitch))
            # The swizzle permutes pieces of 16 bytes, depending on the 128 bytes they belong to.
            piece = arith.andi(arith.shrui(row, ptx.i32(7)), ptx.i32(pitch // 16 - 1))
            place = arith.addi(row, arith.xori(column, arith.shli(piece, ptx.i32(4))))
            self._rows.append(ptx.further(mgpu.utils.memref_ptr(smem), place))
        self._stride, self._kind = EIGHT * pitch, ir.IntegerType.get_signless(2 * width)

    def load(self, eight: int, odd: int) -> ir.Value:
        """Returns both numbers of row 8·eight + 2t + odd in an i32, the lower column's in the lower
        bits."""
        found = llvm.load(self._kind, ptx.further(self._rows[odd], eight * self._stride))
        i32 = ir.IntegerType.get_signless(32)
        return found if self._kind == i32 else arith.extui(i32, found)


class _AdjacentPairs:
    """Loads the codes of a thread's two columns from a tile [64, columns] of 8-bit codes, in the
    order of `in_order_of_codes`."""

    def __init__(self, smem: Any, columns: int):
        column, t = _first_column(columns), arith.andi(ptx.lane(), ptx.i32(3))
        # A row of the swizzle has 128 bytes, and so has one of the tile.
        start = arith.muli(t, ptx.i32(16 * columns))
        self._rows = []
        for n in range(EIGHT):
            row = arith.xori(ptx.i32(n), arith.shli(t, ptx.i32(1)))
            place = arith.addi(start, arith.muli(row, ptx.i32(columns)))
            place = arith.addi(place, arith.xori(column, arith.shli(row, ptx.i32(4))))
            self._rows.append(ptx.further(mgpu.utils.memref_ptr(smem), place))
        self._stride = EIGHT * columns

    def load(self, eight: int, odd: int) -> ir.Value:
        """Returns the codes of product 2·eight + odd in an i32, the lower column's in the lower
        bits."""
        n = 2 * eight + odd
        place = ptx.further(self._rows[n % EIGHT], n // EIGHT * self._stride)
        found = llvm.load(ir.IntegerType.get_signless(16), place)
        return arith.extui(ir.IntegerType.get_signless(32), found)


def _store_turned(loaded: Sequence[ir.Value], gmem: Any) -> None:
    """Writes a thread's 16 pairs of codes, by `_AdjacentPairs`, to its two columns of [64, 64], by
    column and row, of a matrix in global memory: 16 adjacent bytes of each.

    Two rows of pairs are two bytes of each column. The xor of `in_order_of_codes` exchanges such
    halves of a word where t is odd, and words where t is 2 or 3.
    """
    (stride, _), _ = ir.MemRefType(gmem.type).get_strides_and_offset()
    _store_words_of_columns(loaded, mgpu.utils.memref_ptr(gmem), stride)


def _store_words_of_columns(loaded: Sequence[ir.Value], start: ir.Value, stride: int) -> None:
    """Stores what `_store_turned` says, with `stride` bytes between columns from `start` on."""
    t = arith.andi(ptx.lane(), ptx.i32(3))
    is_odd = arith.andi(t, ptx.i32(1))
    # The halves' bytes 0, 1, 4, 5 and 2, 3, 6, 7 of both operands, or the second operand's first.
    turn = arith.muli(is_odd, ptx.i32(0x5410 - 0x1054))
    halves = [arith.subi(ptx.i32(choice), turn) for choice in (0x5410, 0x7632)]
    rows = [
        ptx.run("prmt.b32 $0, $1, $2, 0x5140;", *loaded[n : n + 2])
        for n in range(0, len(loaded), 2)
    ]
    zero = ptx.i32(0)
    swaps = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(t, ptx.i32(2)), zero)
    column = arith.muli(_first_column(COLUMNS), ptx.i32(stride))
    first = arith.addi(column, arith.shli(t, ptx.i32(4)))
    for number, half in enumerate(halves):
        words = [ptx.run("prmt.b32 $0, $1, $2, $3;", *rows[n : n + 2], half) for n in (0, 2, 4, 6)]
        turned = []
        for two in (words[:2], words[2:]):
            turned += [arith.select(swaps, *pair) for pair in (two[::-1], two)]
        place = ptx.further(ptx.further(start, first), number * stride)
        ptx.store_words(place, turned)


def _reader(dtype: Any, table_smem: Any = None) -> Callable[[ir.Value], list[ir.Value]]:
    """Returns a function that converts two numbers of `dtype` in an i32 to f32."""
    f32 = ir.F32Type.get()
    if table_smem is not None:
        copy = arith.andi(ptx.lane(), ptx.i32(COPIES - 1))
        first = arith.addi(ptx.address(table_smem), arith.shli(copy, ptx.i32(3)))

        def look_up(pair: ir.Value) -> list[ir.Value]:
            place = arith.addi(first, arith.muli(pair, ptx.i32(8 * COPIES)))
            return ptx.several(f32, 2, [place], "ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r")

        return look_up
    if dtype == jnp.int8:
        offset = arith.constant(f32, ir.FloatAttr.get(f32, 2.0**23 + 128))

        def convert(pair: ir.Value) -> list[ir.Value]:
            # The last byte of the float 2^23 + n is n, and here n is the number plus 128.
            moved = arith.xori(pair, ptx.i32(0x8080))
            bytes_ = [f"prmt.b32 $0, $1, 0x4B000000, {one};" for one in ("0x7540", "0x7541")]
            found = [mgpu.utils.bitcast(ptx.run(text, moved), f32) for text in bytes_]
            return [arith.subf(one, offset) for one in found]

        return convert
    if bits(dtype) == 8:
        text = "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 $0, h; }"
        return lambda pair: _apart(ptx.run(text, pair), "f16")
    half = "bf16" if dtype == jnp.bfloat16 else "f16"
    return lambda pair: _apart(pair, half)


def _apart(pair: ir.Value, half: str) -> list[ir.Value]:
    """Returns two 16-bit numbers as f32."""
    f32 = ir.F32Type.get()
    if half == "bf16":
        words = arith.shli(pair, ptx.i32(16)), arith.andi(pair, ptx.i32(-0x10000))
        return [mgpu.utils.bitcast(one, f32) for one in words]
    text = "{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, {}; }}"
    return [ptx.run(text.format(one), pair, kind=f32) for one in ("l", "h")]


def _first_column(columns: int) -> ir.Value:
    """Returns 16w + 2g, where w counts the warps that share `columns`."""
    warp = arith.shrui(mgpu.utils.thread_idx(), ptx.i32(5))
    warp = arith.andi(warp, ptx.i32(columns // 16 - 1))
    twice = arith.andi(arith.shrui(ptx.lane(), ptx.i32(1)), ptx.i32(14))
    return arith.addi(arith.shli(warp, ptx.i32(4)), twice)


def _scalars(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Returns a thread's numbers of an array laid out by `PRODUCT`."""
    return [vector.extract(one, [], [0]) for one in array.registers.flat]


def _array(scalars: Sequence[ir.Value]) -> mgpu.FragmentedArray:
    """Returns f32[64, n] laid out by `PRODUCT`, of a thread's numbers."""
    layout, kind = PRODUCT.to_mgpu(), ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.array([vector.from_elements(kind, [one]) for one in scalars], object)
    registers = registers.reshape(layout.registers_shape((COLUMNS, 2 * len(scalars))))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
