"""The gradient of SwiGLU of two DoRA layers, from dh, gate and up to both layers' d and d_g."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import torch

from benchmarks.arrays import pullback, rotate, to_jax
from benchmarks.work import Expectation, Variant, Work
from jax_dora import ops
from parity import oracle, tolerances

ITEM = 2
RESULTS = ("d_gate", "d_up", "d_gate_g", "d_up_g")
# rows, out
SHAPES = (
    (512, 4096),
    (1024, 2048),
    (1024, 8960),
    (2048, 11008),
    (4096, 4096),
    (4096, 12288),
    (4096, 14336),
    (2049, 8200),
    (16384, 4096),
)
QUICK = ((3, 64),)


def works(device: str, quick: bool) -> Iterator[Callable[[], Work]]:
    for shape in QUICK if quick else SHAPES:
        yield functools.partial(work, *shape, device)


def work(rows: int, out: int, device: str) -> Work:
    torch.manual_seed(0)
    dh, gate, up = (torch.randn(rows, out, device=device).bfloat16() for _ in range(3))
    gate_g, up_g = (1 + 0.1 * torch.randn(out, device=device) for _ in range(2))
    operands = (gate, up, gate_g, up_g)
    bounds = tolerances.swiglu(dh, *operands, "bfloat16")
    exact = oracle.swiglu_grads(dh, *operands)
    sets = to_jax(rotate([dh, *operands]))

    def variant(name: str) -> Variant:
        swiglu = functools.partial(ops.swiglu, implementation=name)
        step, kept = pullback(functools.partial(jax.vjp, swiglu), sets, device)
        return Variant("jax", name, step, kept)

    return Work(
        "SwiGLU's gradient",
        {"rows": rows, "out": out},
        5 * rows * out * ITEM,
        0,
        {
            name: Expectation(want, getattr(bounds, name))
            for name, want in zip(RESULTS, exact, strict=True)
        },
        [variant("xla"), variant("mosaic")],
        {"jax xla": "jax xla"},
    )
