"""Products of a dropped x: z = s·(drop(x) A), and dA = drop(x)ᵀ dz; the mask drawn on the way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import torch

from benchmarks.ops.inputs import (
    draw,
    mosaic_refuses,
    rotate,
    same_function,
    to_jax,
    to_torch,
    tuned,
)
from benchmarks.work import Expectation, Work
from jax_dora.ops import device as jax_device
from jax_dora.ops.dropout import draw_seed, drop, keep_mask, kept_share
from jax_dora.ops.mosaic.dropped import DroppedConfig, dropped_product

ITEM = 2
RATE, SCALE = 0.1, 0.5
# rows, in, rank
SHAPES = (
    (4096, 4096, 16),
    (4096, 8192, 16),
    (4096, 4096, 64),
    (4096, 8192, 64),
    (4096, 4096, 128),
    (4096, 8192, 256),
    (4096, 4096, 384),
    (4096, 8192, 384),
    (4096, 12288, 384),
    (1024, 4096, 64),
    (1024, 8192, 384),
    (16384, 4096, 64),
    (4096, 4096, 768),
)
QUICK = ((128, 64, 16),)


def works(device: str, quick: bool) -> Iterator[Callable[[], Work]]:
    for shape in QUICK if quick else SHAPES:
        yield functools.partial(work, *shape, False, device)
        yield functools.partial(work, *shape, True, device)


def work(
    rows: int,
    n_in: int,
    rank: int,
    transposed: bool,
    device: str,
    configs: Sequence[DroppedConfig] = (),
) -> Work:
    """z [rows, r] of right = A [in, r], or dA [in, r] of right = dz [rows, r] if `transposed`."""
    x = draw(device, rows, n_in)
    right = draw(device, *(rows if transposed else n_in, rank))
    seed = draw_seed(jax.random.key(7))
    scale = 1.0 if transposed else SCALE
    dropped = x.double() * to_torch(keep_mask(seed, x.shape, RATE)).to(torch.float64)
    want = scale / kept_share(RATE) * ((dropped.T if transposed else dropped) @ right.double())

    def scaled(product: jax.Array, factor: float) -> jax.Array:
        return (jnp.float32(factor) * product).astype(jnp.bfloat16)

    def xla(x: jax.Array, right: jax.Array) -> jax.Array:
        seen = drop(x, seed, RATE)
        seen = seen.T if transposed else seen
        return scaled(jnp.matmul(seen, right, preferred_element_type=jnp.float32), scale)

    def mosaic(x: jax.Array, right: jax.Array, config: DroppedConfig | None = None) -> jax.Array:
        product = dropped_product(
            *(x, right, seed),
            rate=RATE,
            transposed=transposed,
            sm_count=jax_device.sm_count(),
            config=config,
        )
        return scaled(product, scale / kept_share(RATE))

    inputs = to_jax(rotate([x, right]))
    result = "dA" if transposed else "z"
    plain = same_function("xla", xla, inputs, result)
    return Work(
        f"dropout, {result}",
        {"rows": rows, "in": n_in, "rank": rank},
        ITEM * (rows * n_in + rank * (rows + n_in)),
        2 * rows * n_in * rank,
        {result: Expectation(want)},
        [
            plain,
            # Triton's products draw the mask on the way, as the kernels do.
            dataclasses.replace(plain, name="xla, Triton allowed", compiler_options={}),
            *tuned(
                same_function("mosaic", mosaic, inputs, result, mosaic_refuses(device)),
                configs,
                device,
            ),
        ],
        {"jax xla": "jax xla"},
    )
