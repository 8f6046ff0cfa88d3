"""How kernels read a quantised matrix: tiles of bytes, their numbers, and the order of columns.

Of two 4-bit numbers in a byte the first is the lower. A tile of bytes has the even columns of a
strip in its lower numbers and the odd ones in its upper numbers, so a kernel works on strips whose
even columns come first: what meets them is brought into that order, the result out of it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_dora.ops.mosaic import hopper
from jax_dora.ops.mosaic.codebook import looked_up
from jax_dora.ops.mosaic.low_rank_tiling import Tiling
from jax_dora.ops.quantised import NF4, bits, repeated

# Two's complement.
INT4 = (*range(8), *range(-8, 0))
# What a format of 8 bits is converted to without a detour over fp32.
QUICK = tuple(
    (jnp.dtype(of), jnp.dtype(to))
    for of, to in (("int8", "bfloat16"), ("float8_e4m3fn", "float16"))
)


@dataclasses.dataclass(frozen=True)
class Packing:
    """What is known of a quantised matrix [in, out] that is cut by `tiling`.

    Attributes:
      dtype: of its qvalue; NF4's is uint4.
    """

    dtype: Any
    tiling: Tiling

    @property
    def packed(self) -> int:
        """The columns that an element holds."""
        return 8 // bits(self.dtype)

    def elements(self, qvalue: jax.Array) -> jax.Array:
        """Returns qvalue [in, out] as bytes [in, out / packed]."""
        if self.packed == 1:
            return qvalue
        pairs = qvalue.reshape(qvalue.shape[0], qvalue.shape[1] // 2, 2)
        return lax.bitcast_convert_type(pairs, jnp.uint8)

    def scales(self, scales: jax.Array) -> jax.Array:
        """Returns scales [in / t, out / u] as f32[in / t, padded_out], in the kernel's order."""
        scales = repeated(scales.astype(jnp.float32), 1, self.tiling.out)
        return self.ordered(scales)

    def ordered(self, x: jax.Array) -> jax.Array:
        """Returns x [k, out] as [k, padded_out], in the kernel's order."""
        x = hopper.pad(x, x.shape[0], self.tiling.padded_out)
        if self.packed == 1:
            return x
        strips = x.reshape(x.shape[0], self.tiling.strips, -1, 2)
        return strips.swapaxes(2, 3).reshape(x.shape)

    def in_order(self, y: jax.Array) -> jax.Array:
        """Reverses `ordered`, but for the padding, of y [..., padded_out]."""
        if self.packed == 1:
            return y
        strips = y.reshape(*y.shape[:-1], self.tiling.strips, 2, -1)
        return strips.swapaxes(-1, -2).reshape(y.shape)


def numbers(
    packing: Packing, tile_smem: Any, chunks: Sequence[Any], dtype: Any
) -> Iterator[jax.Array]:
    """Yields the numbers of a tile of bytes, chunk by chunk, in fp32 or in `dtype`, which they are
    rounded to if 4 bits number them."""
    if packing.dtype == jnp.uint4 or (packing.packed == 2 and dtype != jnp.float32):
        codebook = NF4 if packing.dtype == jnp.uint4 else INT4
        yield from looked_up(tile_smem[...], codebook, dtype)
    elif packing.packed == 2:
        byte = tile_smem[...].astype(jnp.int32)
        for code in (byte & 15, byte >> 4):
            yield ((code ^ 8) - 8).astype(jnp.float32)
    else:
        is_quick = (packing.dtype, jnp.dtype(dtype)) in QUICK
        for chunk in chunks:
            yield tile_smem[:, chunk].astype(dtype if is_quick else jnp.float32)
