"""The numbers of two 4-bit codes in a byte, looked up in registers.

One `prmt` instruction picks four bytes of eight by four selectors of four bits each, of which three
count. Two bytes of a thread are four codes, so for each byte of a number

    1. two permutations look the four codes up in either half of the codebook,
    2. a third takes for each code that of its half, by its highest bit;

and more gather the bytes of each number: 20 permutations for four numbers of 32 bits, 8 for four of
16, where a tree of choices takes some 25 instructions for each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jax_dora.ops import choose


def looked_up(
    byte: jax.Array, codebook: Sequence[float], dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of the lower and of the upper codes of u8 [64·k, 8·n], as the tensor
    cores' accumulators are laid out.

    Args:
      codebook: the numbers of codes 0 to 15; they are rounded to `dtype`.
      dtype: float32, bfloat16 or float16.
    """
    numbers = np.array(codebook, np.float32).astype(jnp.dtype(dtype))
    if choose.interpreted():
        code = byte.astype(jnp.int32)
        return _chosen(numbers, code & 15), _chosen(numbers, code >> 4)
    found = plgpu.ShapeDtypeStruct(byte.shape, numbers.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=(found, found))
    def permute(_, byte):
        both = np.empty_like(byte.registers), np.empty_like(byte.registers)
        for at, register in np.ndenumerate(byte.registers):
            both[0][at], both[1][at] = _permuted(register, numbers)
        return tuple(
            mgpu.FragmentedArray(_registers=one, _layout=byte.layout, _is_signed=None)
            for one in both
        )

    call: Callable[..., Any] = permute
    return call(byte)


def _chosen(numbers: np.ndarray, code: jax.Array) -> jax.Array:
    """Returns the number of each i32 code: a tree of choices, a bit a level."""
    found = [jnp.asarray(one) for one in numbers]
    for bit in range(4):
        is_set = (code & (1 << bit)) != 0
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [jnp.where(is_set, upper, lower) for lower, upper in pairs]
    return found[0]


def _permuted(register: ir.Value, numbers: np.ndarray) -> tuple[ir.Value, ir.Value]:
    """Returns the pairs of numbers of the lower and of the upper codes in a register of two
    bytes."""
    bits = numbers.view(np.uint32 if numbers.itemsize == 4 else np.uint16)
    # The codes from the lowest on: the first byte's lower and upper one, then the second's.
    lines = [
        ".reg .b32 code, half, low, high, p<4>, t<4>;",
        f"and.b32 code, ${numbers.itemsize}, 0x7777;",
        # The selector of the third permutation: 0 1 2 3, or with a code's highest bit 4 5 6 7.
        f"and.b32 half, ${numbers.itemsize}, 0x8888;",
        "shr.u32 half, half, 1;",
        "or.b32 half, half, 0x3210;",
    ]
    for place in range(numbers.itemsize):
        plane = ((bits >> (8 * place)) & 0xFF).astype(np.uint8).view(np.uint32)
        lines += [
            f"prmt.b32 low, {plane[0]:#x}, {plane[1]:#x}, code;",
            f"prmt.b32 high, {plane[2]:#x}, {plane[3]:#x}, code;",
            f"prmt.b32 p{place}, low, high, half;",
        ]
    i32 = ir.IntegerType.get_signless(32)
    codes = arith.extui(i32, mgpu.utils.bitcast(register, ir.IntegerType.get_signless(16)))
    if numbers.itemsize == 2:
        lines += ["prmt.b32 $0, p0, p1, 0x6240;", "prmt.b32 $1, p0, p1, 0x7351;"]
        element = ir.BF16Type.get() if numbers.dtype != np.float16 else ir.F16Type.get()
        pair = ir.VectorType.get((2,), element)
        lower, upper = (mgpu.utils.bitcast(one, pair) for one in _run(lines, codes, 2))
        return lower, upper
    for half, selector in enumerate((0x5140, 0x7362)):
        lines += [
            f"prmt.b32 t{2 * half}, p0, p1, {selector:#x};",
            f"prmt.b32 t{2 * half + 1}, p2, p3, {selector:#x};",
            f"prmt.b32 ${2 * half}, t{2 * half}, t{2 * half + 1}, 0x5410;",
            f"prmt.b32 ${2 * half + 1}, t{2 * half}, t{2 * half + 1}, 0x7632;",
        ]
    four = [mgpu.utils.bitcast(one, ir.F32Type.get()) for one in _run(lines, codes, 4)]
    pair = ir.VectorType.get((2,), four[0].type)
    lower, upper = (vector.from_elements(pair, four[start::2]) for start in (0, 1))
    return lower, upper


def _run(lines: Sequence[str], codes: ir.Value, results: int) -> list[ir.Value]:
    """Returns the i32 results of PTX whose operand, after the results, is `codes`."""
    i32 = ir.IntegerType.get_signless(32)
    struct = llvm.StructType.get_literal([i32] * results)
    text = "{\n" + "\n".join(lines) + "\n}"
    found = llvm.inline_asm(struct, [codes], text, ",".join(["=r"] * results + ["r"]))
    return [llvm.extractvalue(i32, found, [i]) for i in range(results)]
