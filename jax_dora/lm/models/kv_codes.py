"""Keys and values in FP8: a Hadamard transform of queries and keys, and codes with scales.

    q·k = Hq·Hk      H = H_n ⊗ I / sqrt(n)      codes = round(x / scale)      scale = max |x| / 448

H_n is Sylvester's matrix of ±1, n the largest power of two that divides head_dim: for head_dim 96
it transforms three blocks of 32. H is orthogonal, so that products of queries and keys do not
change. It spreads a large channel over all others, as in QuaRot (arXiv 2404.00456), after the
rotary embedding. A scale belongs to one token and kv head.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dora.ops import CodedEntries
from jax_dora.quantisation import QTYPE

# Capacities are multiples of this, which the kernel needs.
BLOCK = 128
_LARGEST = float(jnp.finfo(QTYPE).max)


def check_format(kv_cache: str | None) -> None:
    """Raises ValueError unless `kv_cache` is None or "float8_e4m3fn"."""
    if kv_cache not in (None, QTYPE):
        raise ValueError(f"kv_cache={kv_cache!r}: expected None, for the model's dtype, or {QTYPE}")


def transformed(x: jax.Array) -> jax.Array:
    """Returns Hx for x [..., head_dim], in fp32."""
    size = x.shape[-1]
    block = size & -size
    # Products of bf16 and ±1 are exact. Of fp16, XLA has no such product on CPU.
    x = x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
    blocks = x.reshape(*x.shape[:-1], size // block, block)
    y = lax.dot_general(
        blocks,
        jnp.asarray(_sylvester(block), x.dtype),
        (((blocks.ndim - 1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y.reshape(x.shape) * block**-0.5


@functools.cache
def _sylvester(size: int) -> np.ndarray:
    """Returns the Hadamard matrix of ±1 whose size is a power of two."""
    matrix = np.ones((1, 1), np.int8)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def coded(x: jax.Array) -> CodedEntries:
    """Returns the codes of x [..., head_dim], with scales [...]."""
    x = x.astype(jnp.float32)
    # Of zeros, the scale is not 0. NaN stays NaN.
    scales = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), 1e-30) / _LARGEST
    return CodedEntries((x / scales[..., None]).astype(QTYPE), scales)
