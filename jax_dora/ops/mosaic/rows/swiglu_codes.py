"""SwiGLU of two composes, with its rows quantised to FP8 with one scale per row.

    gate, up  [rows, out]  bf16 or fp16      g, b of gate and of up  f32[out]
    h = silu(g₁∘gate + b₁)∘(g₂∘up + b₂)      [rows, out]  gate's dtype
    ĥ = round(h / s)  [rows, out]  float8_e4m3fn      s = max |h| / 448 per row, f32[rows]

A row is computed in chunks of its features, and h stays in shared memory until the row's maximum is
known. `row_codes` is the same for rows that exist already; sigmoid is computed
as in `swiglu_backward`. Without g, gate and up are multiplied by it already.

Bytes: 4 · rows · out read, 3 · rows · out written; the floor is bytes / copy rate. For each row the
vectors are also read from the L2 cache.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper.launch import launcher
from jax_dora.ops.mosaic.hopper.limits import RESERVED, SHARED_MEMORY
from jax_dora.ops.mosaic.rows import row_codes
from jax_dora.ops.mosaic.rows.row_codes import LEAST, MAX_CHUNK, MAX_SIDE, QTYPE
from jax_dora.ops.rounding import bound


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning parameters.

    Attributes:
      stages: the number of pipeline stages.
      blocks_per_sm: the number of thread blocks per multiprocessor: one computes while another
        waits for memory.
      chunk: the most features that are computed at a time.
    """

    stages: int = 2
    blocks_per_sm: int = 3
    chunk: int = MAX_CHUNK


def refuses(rows: int, out: int, dtype: jax.typing.DTypeLike, vectors: int) -> str | None:
    """Returns why the kernel does not support [rows, out] of `dtype`, or None."""
    return row_codes.refuses(rows, out, dtype)


def wins(rows: int, out: int, dtype: jax.typing.DTypeLike, vectors: int) -> bool:
    """Returns whether the kernel is expected to be faster than XLA and `row_codes` (H100,
    `h100/tried.jsonl`, "SwiGLU with FP8 codes")."""
    is_large = rows * out >= 2**23 and (out >= 8192 or rows >= 4096)
    return row_codes.wins(rows, out, dtype) and is_large and (vectors <= 2 or out <= 8192)


def config(rows: int, out: int, dtype: jax.typing.DTypeLike, vectors: int) -> Config:
    """Returns the config for [rows, out] of `dtype` and 0, 2 or 4 vectors: as many thread blocks as
    shared memory has room for, up to 6. Without vectors, what is left is for larger chunks and for
    more of them on their way."""
    row, bytes_per_feature = RESERVED + out * (2 + 1), 2 * 2 + 4 * vectors
    buffers = 2 * math.gcd(out, MAX_CHUNK) * bytes_per_feature
    blocks = min(6, SHARED_MEMORY // (row + buffers))
    if vectors:
        return Config(blocks_per_sm=blocks)
    room = SHARED_MEMORY // blocks - row
    chunk = next(n for n in (2 * MAX_CHUNK, MAX_CHUNK) if room >= 2 * math.gcd(out, n) * 4)
    return Config(min(6, room // (math.gcd(out, chunk) * 4)), blocks, chunk)


@launcher()
def launch(
    gate: jax.Array,
    up: jax.Array,
    gate_g: jax.Array | None = None,
    up_g: jax.Array | None = None,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    *,
    config: Config,
    sm_count: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (h [..., out], ĥ [..., out], s f32[...]) for gate, up [..., out]."""
    *lead, out = gate.shape
    dtype, rows = gate.dtype, gate.size // out
    lane = math.gcd(out, MAX_SIDE)
    width, chunk = out // lane, math.gcd(out, config.chunk) // lane
    chunks = width // chunk
    blocks = min(rows, sm_count * config.blocks_per_sm)
    steps = pl.cdiv(rows, blocks)
    vectors = [] if gate_g is None or up_g is None else [gate_g, up_g]
    if gate_bias is not None or up_bias is not None:
        zeros = jnp.zeros(out, jnp.float32)
        vectors += [zeros if bias is None else bias for bias in (gate_bias, up_bias)]
    stacked = []
    if vectors:
        whole = jnp.stack([vector.astype(jnp.float32) for vector in vectors])
        stacked.append(whole.reshape(-1, width, lane))
    inverse_bound = 1 / bound(QTYPE)

    # gate_gmem, up_gmem, h_gmem, codes_gmem [rows, width, lane]; vectors_gmem [vectors, width,
    # lane], or nothing; scales_gmem [steps · blocks]; h_smem, codes_smem [1, width, lane]
    def kernel(gate_gmem, up_gmem, *refs):
        *vectors_gmem, h_gmem, codes_gmem, scales_gmem, h_smem, codes_smem = refs

        zeros = jnp.zeros((chunk, lane), jnp.float32)

        # gate_smem, up_smem [1, chunk, lane]; vectors_smem [vectors, chunk, lane], or nothing
        def step(indices, gate_smem, up_smem, *rest):
            (index, i), (*vectors_smem, largest) = indices, rest
            row = lax.axis_index("block") + index * blocks

            @pl.when(i == 0)
            def _wait_for_the_last_row():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            gs_and_biases = [one[i] for one in vectors_smem for i in range(len(vectors))]
            (g1, g2), biases = gs_and_biases[:2] or (None, None), gs_and_biases[2:]
            features = pl.ds(i * chunk, chunk)
            y1 = gate_smem[0].astype(jnp.float32)
            y2 = up_smem[0].astype(jnp.float32)
            if g1 is not None:
                y1, y2 = g1 * y1, g2 * y2
            if biases:
                y1, y2 = y1 + biases[0], y2 + biases[1]
            root = lax.rsqrt(1.0 + jnp.exp(-y1))
            h = (y1 * (root * root) * y2).astype(dtype)
            h_smem[0, features] = h
            largest = jnp.maximum(largest, jnp.abs(h.astype(jnp.float32)))
            plgpu.commit_smem()  # TMA must not refill a buffer that is still being read.

            @pl.when(i == chunks - 1)
            def _code():
                plgpu.copy_smem_to_gmem(h_smem, h_gmem.at[pl.ds(row, 1)])
                scale = jnp.maximum(jnp.max(largest) * inverse_bound, LEAST)
                inverse = 1 / scale  # once, as a quotient takes several instructions
                for start in range(0, width, chunk):
                    at = pl.ds(start, chunk)
                    codes = h_smem[0, at].astype(jnp.float32) * inverse
                    codes_smem[0, at] = codes.astype(QTYPE)
                scales_gmem[row] = scale
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(codes_smem, codes_gmem.at[pl.ds(row, 1)])

            return lax.cond(i == chunks - 1, lambda: zeros, lambda: largest)

        in_row = plgpu.BlockSpec(
            (1, chunk, lane), lambda index, i: (lax.axis_index("block") + index * blocks, i, 0)
        )
        in_vectors = plgpu.BlockSpec((len(vectors), chunk, lane), lambda _, i: (0, i, 0))
        # One pipeline for all rows of the thread block: the next row is on its way while codes are
        # made of one.
        plgpu.emit_pipeline(
            step,
            grid=(steps, chunks),
            in_specs=[in_row, in_row, *[in_vectors] * len(vectors_gmem)],
            max_concurrent_steps=config.stages,
            init_carry=zeros,
        )(gate_gmem, up_gmem, *vectors_gmem)
        plgpu.wait_smem_to_gmem(0)

    view, whole_row = (rows, width, lane), (1, width, lane)
    h, codes, scales = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(view, dtype),
            jax.ShapeDtypeStruct(view, QTYPE),
            jax.ShapeDtypeStruct((steps * blocks,), jnp.float32),
        ],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM(whole_row, dtype), plgpu.SMEM(whole_row, QTYPE)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="dora_swiglu_codes",
    )(gate.reshape(view), up.reshape(view), *stacked)
    return h.reshape(gate.shape), codes.reshape(gate.shape), scales[:rows].reshape(lead)
