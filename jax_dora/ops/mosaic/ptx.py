"""Instructions that Mosaic has no name for, and the table in shared memory that they look up.

A table has a column for each lane of a warp, so that no two lanes want the same bank: entry n of a
lane lies 4·(32·n + lane) bytes from the start, where a dot product of four bytes gets in one
instruction from any byte of a register.
"""

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


def lanes_column(table_smem: Any) -> ir.Value:
    """Returns the address of the first entry of the lane's own column of a table."""
    address = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(table_smem))
    address = arith.trunci(ir.IntegerType.get_signless(32), address)
    return arith.addi(address, arith.shli(lane(), i32(2)))


def entry(column: ir.Value, codes: ir.Value, byte: int, kind: ir.Type | None = None) -> ir.Value:
    """Returns the entry, i32 or f32, that a byte of `codes` numbers."""
    stride = i32((4 * LANES) << (8 * byte))
    address = run("dp4a.u32.u32 $0, $1, $2, $3;", codes, stride, column)
    return run(f"ld.shared.{'b32' if kind is None else 'f32'} $0, [$1];", address, kind=kind)
