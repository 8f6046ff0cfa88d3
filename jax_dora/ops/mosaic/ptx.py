"""Instructions that Mosaic has no name for, and the table in shared memory that they look up.

A table has a column for each lane of a warp, so that no two lanes want the same bank: entry n of a
lane lies 4·(32·n + lane) bytes from the start, where a dot product of four bytes gets in one
instruction from any byte of a register.
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
    """Returns the result, i32 if no other kind is given, of an instruction without side effects
    on operands that are i32."""
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
    """Returns the results, all of a kind, of an instruction."""
    struct = llvm.StructType.get_literal([kind] * count)
    found = llvm.inline_asm(struct, operands, text, constraints, has_side_effects=effects)
    return [llvm.extractvalue(kind, found, [i]) for i in range(count)]


def act(text: str) -> None:
    """Runs an instruction that has neither operands nor results, where it stands."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)


def further(pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
    """Returns a pointer some bytes further on."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def store_if_positive(number: ir.Value, pointer: ir.Value, values: Sequence[ir.Value]) -> None:
    """Stores f32 values, one or four, where a pointer to global memory points, if an i32 is
    positive."""
    given = ",".join(f"${2 + i}" for i in range(len(values)))
    size = "" if len(values) == 1 else f".v{len(values)}"
    text = f"{{ .reg .pred p; setp.gt.s32 p, $0, 0; @p st.global{size}.f32 [$1], {{{given}}}; }}"
    constraints = ",".join(["r", "l", *["f"] * len(values)])
    operands = [number, pointer, *values]
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)


def pinned(values: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns i32 values, which are known before whatever is done for its effects after this."""
    count = len(values)
    constraints = ["=r"] * count + [str(i) for i in range(count)]
    kind = ir.IntegerType.get_signless(32)
    return several(kind, count, values, "// pinned", ",".join(constraints), effects=True)


def address(ref_smem: Any) -> ir.Value:
    """Returns where in shared memory an array begins, i32."""
    found = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref_smem))
    return arith.trunci(ir.IntegerType.get_signless(32), found)


def lanes_column(table_smem: Any) -> ir.Value:
    """Returns the address of the first entry of the lane's own column of a table."""
    return arith.addi(address(table_smem), arith.shli(lane(), i32(2)))


def load_matrices(place: ir.Value, *, transposed: bool) -> list[ir.Value]:
    """Returns of four matrices of 8 × 8 numbers of 16 bits, to whose rows lanes 8n and on have the
    addresses, what lane 4g + t has: of row g, or of column g if `transposed`, the numbers 2t and
    2t + 1."""
    trans = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
    kind = ir.IntegerType.get_signless(32)
    return several(kind, 4, [place], text, "=r,=r,=r,=r,r", effects=True)


def descriptor(ref_smem: Any, stride: int) -> ir.Value:
    """Returns, for a warpgroup's product, how its second operand lies in shared memory: in rows of
    128 bytes with a swizzle of as many, `stride` bytes from each 8 rows to the next."""
    place = arith.andi(arith.shrui(address(ref_smem), i32(4)), i32(0x3FFF))
    place = arith.extui(ir.IntegerType.get_signless(64), place)
    return arith.ori(place, i64((1 << 62) | (stride >> 4 << 32) | (1 << 16)))


def entry(column: ir.Value, codes: ir.Value, byte: int, kind: ir.Type | None = None) -> ir.Value:
    """Returns the entry, i32 or f32, that a byte of `codes` numbers."""
    stride = i32((4 * LANES) << (8 * byte))
    address = run("dp4a.u32.u32 $0, $1, $2, $3;", codes, stride, column)
    return run(f"ld.shared.{'b32' if kind is None else 'f32'} $0, [$1];", address, kind=kind)
