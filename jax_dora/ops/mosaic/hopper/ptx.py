"""PTX instructions that Mosaic does not offer, and lookup tables in shared memory.

A table has a column for each lane of a warp, so that lookups have no bank conflicts. Entry n of a
lane is 4·(32·n + lane) bytes after the start. One instruction, a dot product of four bytes,
computes this address from any byte of a register.
"""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

LANES = 32


def i32(value: int) -> ir.Value:
    """Returns a constant."""
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def run(text: str, *operands: ir.Value, kind: ir.Type | None = None) -> ir.Value:
    """Runs an instruction without side effects on i32 operands, and returns its result, i32 unless
    `kind` is given."""
    constraint = "=r" if kind is None else "=f"
    constraints = ",".join([constraint] + ["r"] * len(operands))
    return llvm.inline_asm(kind or ir.IntegerType.get_signless(32), operands, text, constraints)


def lane() -> ir.Value:
    """Returns the thread's number in its warp."""
    return arith.andi(mgpu.utils.thread_idx(), i32(LANES - 1))


def i64(value: int) -> ir.Value:
    """Returns a constant."""
    kind = ir.IntegerType.get_signless(64)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def several(
    kind: ir.Type,
    count: int,
    operands: Sequence[ir.Value],
    text: str,
    constraints: str,
    *,
    effects: bool = False,
) -> list[ir.Value]:
    """Runs an instruction and returns its `count` results of type `kind`."""
    struct = llvm.StructType.get_literal([kind] * count)
    found = llvm.inline_asm(struct, operands, text, constraints, has_side_effects=effects)
    return [llvm.extractvalue(kind, found, [i]) for i in range(count)]


def act(text: str) -> None:
    """Runs an instruction without operands and results, in program order."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)


def further(pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
    """Returns a pointer `offset` bytes after `pointer`."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def store_if_positive(number: ir.Value, pointer: ir.Value, values: Sequence[ir.Value]) -> None:
    """Stores one, two or four f32 values to global memory if the i32 `number` is positive."""
    given = ",".join(f"${2 + i}" for i in range(len(values)))
    size = "" if len(values) == 1 else f".v{len(values)}"
    text = f"{{ .reg .pred p; setp.gt.s32 p, $0, 0; @p st.global{size}.f32 [$1], {{{given}}}; }}"
    constraints = ",".join(["r", "l", *["f"] * len(values)])
    operands = [number, pointer, *values]
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)


def store_words(pointer: ir.Value, words: Sequence[ir.Value]) -> None:
    """Stores four i32 values to global memory, at a multiple of 16 bytes."""
    text = "st.global.v4.b32 [$0], {$1,$2,$3,$4};"
    none = ir.Type.parse("!llvm.void")
    llvm.inline_asm(none, [pointer, *words], text, "l,r,r,r,r", has_side_effects=True)


def pinned(values: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the i32 values unchanged, and makes LLVM compute them before later side effects."""
    count = len(values)
    constraints = ["=r"] * count + [str(i) for i in range(count)]
    kind = ir.IntegerType.get_signless(32)
    return several(kind, count, values, "// pinned", ",".join(constraints), effects=True)


def address(ref_smem: Any) -> ir.Value:
    """Returns the address in shared memory of an array's start, i32."""
    found = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref_smem))
    return arith.trunci(ir.IntegerType.get_signless(32), found)


def lanes_column(table_smem: Any) -> ir.Value:
    """Returns the address of the first entry in the lane's column of a table."""
    return arith.addi(address(table_smem), arith.shli(lane(), i32(2)))


def load_matrices(place: ir.Value, *, transposed: bool) -> list[ir.Value]:
    """Loads four matrices of 8 × 8 numbers of 16 bits by `ldmatrix`, a register for each matrix.

    Lanes 8n to 8n + 7 pass the addresses (`place`) of the rows of matrix n. Lane 4g + t gets the
    numbers 2t and 2t + 1 of row g, or of column g if `transposed`.
    """
    trans = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
    kind = ir.IntegerType.get_signless(32)
    return several(kind, 4, [place], text, "=r,=r,=r,=r,r", effects=True)


def descriptor(ref_smem: Any, stride: int) -> ir.Value:
    """Returns the descriptor of a right operand of wgmma in shared memory, with rows of 128 bytes,
    a 128-byte swizzle, and `stride` bytes between groups of 8 rows."""
    place = arith.andi(arith.shrui(address(ref_smem), i32(4)), i32(0x3FFF))
    place = arith.extui(ir.IntegerType.get_signless(64), place)
    return arith.ori(place, i64((1 << 62) | (stride >> 4 << 32) | (1 << 16)))


def wgmma(
    half: str, left: Sequence[ir.Value], right: ir.Value, sums: list[ir.Value], *, add: bool = True
) -> list[ir.Value]:
    """Starts one wgmma m64n(8·n)k16, and returns its results, f32.

    Args:
      half: the type of the operands, "bf16" or "f16".
      left: the left operand, four registers.
      right: the right operand, a `descriptor`.
      sums: 4·n accumulators.
      add: whether the product is added to `sums`; otherwise it replaces them.
    """
    count = len(sums)
    outputs = ",".join(f"${i}" for i in range(count))
    inputs = [f"${i}" for i in range(2 * count, 2 * count + 5)]
    text = (
        f"{{ .reg .pred p; setp.eq.b32 p, {int(not add)}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.{half}.{half} {{{outputs}}}, "
        f"{{{','.join(inputs[:4])}}}, {inputs[4]}, p, 1, 1, 0; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"]
    operands = [*sums, *left, right]
    return several(ir.F32Type.get(), count, operands, text, ",".join(constraints), effects=True)


def entry(column: ir.Value, codes: ir.Value, byte: int, kind: ir.Type | None = None) -> ir.Value:
    """Returns the table entry, i32 or f32, whose number is a byte of `codes`."""
    stride = i32((4 * LANES) << (8 * byte))
    address = run("dp4a.u32.u32 $0, $1, $2, $3;", codes, stride, column)
    return run(f"ld.shared.{'b32' if kind is None else 'f32'} $0, [$1];", address, kind=kind)
