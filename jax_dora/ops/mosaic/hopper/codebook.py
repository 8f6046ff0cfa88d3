"""Lookup tables for codes, and the lookup of 4-bit codes into the layout of accumulators."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jax_dora.ops.dispatch import choose
from jax_dora.ops.mosaic.hopper import ptx
from jax_dora.ops.quantised import NF4, bits

# Each of the four lanes that share a row loads the whole row of 32 codes, 16 bytes.
CODES = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 32), (16, 32), (8, 32))),
    warp_dims=(-6,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)


def numbers(dtype: Any) -> np.ndarray:
    """Returns the numbers of all codes of a dtype from code 0 on, f32[2^bits]. uint4 means NF4."""
    if dtype == jnp.uint4:
        return np.array(NF4, np.float32)
    codes = np.arange(1 << bits(dtype), dtype=np.uint8)
    if dtype == jnp.int4:
        return np.where(codes < 8, codes, codes - 16.0).astype(np.float32)
    return codes.view(dtype).astype(np.float32)


def table(dtype: Any, columns: int) -> np.ndarray:
    """Returns the lookup table that `looked_up` reads, f32[⌈512 / columns⌉, columns]."""
    entries = np.repeat(numbers(dtype), ptx.LANES)
    return np.pad(entries, (0, -len(entries) % columns)).reshape(-1, columns)


def looked_up(codes_smem: Any, table_smem: Any) -> jax.Array:
    """Returns the numbers of 4-bit codes [64, 32·n], laid out as accumulators, as f32."""
    if choose.interpreted():
        codes = lax.bitcast_convert_type(codes_smem[...], jnp.uint4).astype(jnp.int32)
        return table_smem[...].reshape(-1, ptx.LANES)[:, 0][codes]
    codes = plgpu.load(codes_smem, layout=CODES, optimized=False)
    found = plgpu.ShapeDtypeStruct(codes.shape, jnp.dtype("float32"), layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(CODES, plgpu.RefType()), return_type=found)
    def look_up(_, codes, table_smem):
        return _looked_up(codes, ptx.lanes_column(table_smem))

    call: Callable[..., Any] = look_up
    return call(codes, table_smem)


def _looked_up(codes: mgpu.FragmentedArray, column: ir.Value) -> mgpu.FragmentedArray:
    f32 = ir.F32Type.get()
    four_words = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
    pair = ir.VectorType.get((2,), f32)
    # Of eight columns, lane 4g + t needs the two whose codes are byte t of the word.
    at = arith.andi(ptx.lane(), ptx.i32(3))
    own_byte = arith.addi(arith.muli(at, ptx.i32(0x11)), ptx.i32(0x40))
    low = ptx.i32(0x0F0F0F0F)
    held: Any = codes.registers.reshape(-1, 2)  # [columns / 32, row of two]
    found = np.empty((len(held), 4, 2), object)
    for group, row in np.ndindex(held.shape):
        words = mgpu.utils.bitcast(held[group, row], four_words)
        words = [vector.extract(words, [], [word]) for word in range(4)]
        two = [ptx.run("prmt.b32 $0, $1, $2, $3;", *words[i : i + 2], own_byte) for i in (0, 2)]
        own = ptx.run("prmt.b32 $0, $1, $2, 0x5410;", *two)
        first = arith.andi(own, low)
        second = arith.andi(arith.shrui(own, ptx.i32(4)), low)
        for word in range(4):
            both = [ptx.entry(column, one, word, f32) for one in (first, second)]
            found[group, word, row] = vector.from_elements(pair, both)
    layout = plgpu.Layout.WGMMA.to_mgpu()
    registers = found.reshape(layout.registers_shape(codes.shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
