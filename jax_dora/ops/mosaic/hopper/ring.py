"""A ring of buffers, into which one warpgroup fetches slices that the others, consumers, multiply.

`free` has a barrier for each buffer; a consumer arrives when it no longer needs the buffer. The
contracted axis may be split into parts, whose sums XLA adds up.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_dora.ops.mosaic.hopper import limits


def parts(steps: int, tiles: int, sm_count: int) -> int:
    """Returns the number of parts, if a tile of the result has `steps` slices."""
    # A part's overhead, in steps, is filling the ring, storing, and adding up.
    return limits.balanced(steps, tiles, sm_count, overhead=6, most=16)


def fetch(steps, copies, free) -> None:
    """Fetches `steps` slices, each as soon as its buffer is free.

    `copies(i, stage)` returns (source, buffer, barrier) for each operand of slice i.
    """

    def fetch_slice(i, _):
        stage = lax.rem(i, free.shape[0])
        operands = copies(i, stage)
        plgpu.barrier_wait(free.at[stage])
        for source_gmem, buffer_smem, ready in operands:
            plgpu.copy_gmem_to_smem(source_gmem, buffer_smem, ready)

    lax.fori_loop(0, steps, fetch_slice, None)
    drain(free)


def drain(free) -> None:
    """Waits until the consumers have freed every buffer for the last time."""
    # They free every buffer once more than it is filled. All arrivals at a barrier must be waited
    # for before the kernel ends.
    for stage in range(free.shape[0]):
        plgpu.barrier_wait(free.at[stage])


def release(free) -> None:
    """Frees every buffer, before the first slice."""
    for stage in range(free.shape[0]):
        plgpu.barrier_arrive(free.at[stage])


def accumulate(steps, multiply, shape: tuple[int, int], free, number=lambda i: i) -> jax.Array:
    """Returns f32[shape], the sum of the products of `steps` slices, at least one.

    A slice's buffer is freed when the next product is under way; the caller frees the last.

    Args:
      multiply: `multiply(acc_ref, stage, i)` waits for slice i and issues its wgmma.
      number: maps i to the slice's number among all that the ring carries.
    """
    stages = free.shape[0]

    def accumulate_slices(acc_ref):
        def step(i, acc_ref):
            multiply(acc_ref, lax.rem(number(i), stages), i)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(free.at[lax.rem(number(i) - 1, stages)])
            return acc_ref

        multiply(acc_ref, lax.rem(number(0), stages), 0)
        lax.fori_loop(1, steps, step, acc_ref)
        return acc_ref[...]

    return pl.run_scoped(accumulate_slices, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
