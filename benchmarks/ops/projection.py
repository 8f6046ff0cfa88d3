"""A whole projection, g∘(x W + z B), and dx = d Wᵀ + dz Aᵀ: one product, or product and rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import torch

from benchmarks.ops.inputs import (
    draw,
    interpreted,
    mosaic_refuses,
    rotate,
    same_function,
    to_jax,
    tuned,
)
from benchmarks.work import Expectation, Work
from jax_dora.ops import device as jax_device
from jax_dora.ops.compose import define
from jax_dora.ops.mosaic import expand_compose as mosaic_expand
from jax_dora.ops.mosaic import projection as mosaic_projection
from jax_dora.ops.mosaic.projection import ProjectionConfig

ITEM = 2
# rows, in, out, rank: square projections, an MLP's up and down, a narrow one of grouped heads.
SHAPES = (
    (4096, 4096, 4096, 384),
    (4096, 8192, 8192, 384),
    (4096, 4096, 12288, 384),
    (4096, 12288, 4096, 384),
    (4096, 4096, 1024, 384),
    (1024, 8192, 8192, 384),
    (16384, 4096, 4096, 384),
    (4096, 8192, 8192, 64),
)
QUICK = ((128, 64, 128, 16),)


def works(device: str, quick: bool) -> Iterator[Callable[[], Work]]:
    for shape in QUICK if quick else SHAPES:
        yield functools.partial(forward, *shape, device)
        yield functools.partial(backward, *shape, device)


def forward(
    rows: int,
    n_in: int,
    n_out: int,
    rank: int,
    device: str,
    configs: Sequence[ProjectionConfig] = (),
) -> Work:
    x, kernel = draw(device, rows, n_in), draw(device, n_in, n_out, size=n_in**-0.5)
    z, lora_b = draw(device, rows, rank), draw(device, rank, n_out, size=0.3 * rank**-0.5)
    g = 1 + 0.05 * torch.randn(n_out, device=device)
    want = g.double() * (x.double() @ kernel.double() + z.double() @ lora_b.double())
    inputs = to_jax(rotate([x, kernel, z, lora_b, g]))
    one = jnp.float32(1)

    def xla(x: jax.Array, kernel: jax.Array, z: jax.Array, lora_b: jax.Array, g: jax.Array):
        return define(x @ kernel, z @ lora_b, g, one, delta=False, want_inner=False)[0]

    def expanded(x: jax.Array, kernel: jax.Array, z: jax.Array, lora_b: jax.Array, g: jax.Array):
        sm_count = jax_device.sm_count()
        return mosaic_expand.expand_compose(
            x @ kernel, z, lora_b, g, one, want_inner=False, sm_count=sm_count
        )[0]

    def projected(x, kernel, z, lora_b, g, config=None):
        sm_count = jax_device.sm_count()
        return mosaic_projection.project(
            x, kernel, z, lora_b, g, want_inner=False, sm_count=sm_count, config=config
        )[0]

    dtypes = (jnp.bfloat16, jnp.bfloat16)
    no_mosaic = mosaic_refuses(device)
    return Work(
        "projection",
        {"rows": rows, "in": n_in, "out": n_out, "rank": rank},
        ITEM * (rows * (n_in + n_out + rank) + n_out * (n_in + rank)),
        2 * rows * n_out * (n_in + rank),
        {"y": Expectation(want)},
        [
            same_function("xla", xla, inputs, "y"),
            same_function(
                "xla, mosaic expand",
                interpreted(expanded, device),
                inputs,
                "y",
                no_mosaic or mosaic_expand.refuses(rows, rank, n_out, *dtypes),
            ),
            *tuned(
                same_function(
                    "mosaic",
                    projected,
                    inputs,
                    "y",
                    no_mosaic or mosaic_projection.refuses(rows, n_in, n_out, *dtypes),
                ),
                configs,
                device,
            ),
        ],
        {"jax xla": "jax xla"},
    )


def backward(
    rows: int,
    n_in: int,
    n_out: int,
    rank: int,
    device: str,
    configs: Sequence[ProjectionConfig] = (),
) -> Work:
    d, kernel = draw(device, rows, n_out), draw(device, n_in, n_out, size=n_in**-0.5)
    dz, lora_a = draw(device, rows, rank), draw(device, n_in, rank, size=n_in**-0.5)
    want = d.double() @ kernel.double().T + dz.double() @ lora_a.double().T
    inputs = to_jax(rotate([d, kernel, dz, lora_a]))

    def xla(d: jax.Array, kernel: jax.Array, dz: jax.Array, lora_a: jax.Array):
        return d @ kernel.T + dz @ lora_a.T

    def projected(d, kernel, dz, lora_a, config=None):
        sm_count = jax_device.sm_count()
        return mosaic_projection.project_back(
            d, kernel, dz, lora_a, sm_count=sm_count, config=config
        )

    refusal = mosaic_projection.refuses(rows, n_in, n_out, jnp.bfloat16, jnp.bfloat16)
    return Work(
        "projection's dx",
        {"rows": rows, "in": n_in, "out": n_out, "rank": rank},
        ITEM * (rows * (n_in + n_out + rank) + n_in * (n_out + rank)),
        2 * rows * n_in * (n_out + rank),
        {"dx": Expectation(want)},
        [
            same_function("xla", xla, inputs, "dx"),
            *tuned(
                same_function(
                    "mosaic",
                    projected,
                    inputs,
                    "dx",
                    mosaic_refuses(device) or refusal,
                ),
                configs,
                device,
            ),
        ],
        {"jax xla": "jax xla"},
    )
