"""Expand, z B, and compose: two kernels or one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from benchmarks.ops.compose import triton_is_exact, triton_refuses
from benchmarks.ops.inputs import interpreted, mosaic_refuses, rotate, to_jax, to_torch, tuned
from benchmarks.work import Expectation, Variant, Work
from jax_dora.ops import device as jax_device
from jax_dora.ops.compose import define
from jax_dora.ops.mosaic import compose as mosaic_compose
from jax_dora.ops.mosaic import expand_compose as mosaic_expand
from jax_dora.ops.mosaic import rowwise
from jax_dora.ops.mosaic.strips import StripConfig
from parity import oracle, tolerances
from parity.cases import Case, compose_inputs
from torch_dora.ops.compose import forward as torch_forward
from torch_dora.ops.triton import expand_compose as triton_expand

DTYPE = "bfloat16"
ITEM = 2
# rows, rank, out
SHAPES = (
    (4096, 384, 4096),
    (4096, 384, 8192),
    (4096, 384, 14336),
    (4096, 384, 28672),
    (1024, 384, 8192),
    (16384, 384, 8192),
    (4096, 64, 8192),
    (4096, 128, 8192),
    (4096, 768, 8192),
    (1000, 72, 1112),
)
INNER_SHAPES = ((4096, 384, 4096), (4096, 384, 8192), (4096, 384, 14336))
QUICK = ((64, 16, 128),)


def works(device: str, quick: bool) -> Iterator[Callable[[], Work]]:
    for shape in QUICK if quick else SHAPES:
        yield functools.partial(work, *shape, False, device)
    for shape in QUICK if quick else INNER_SHAPES:
        yield functools.partial(work, *shape, True, device)


def work(
    rows: int,
    rank: int,
    out: int,
    want_inner: bool,
    device: str,
    configs: Sequence[StripConfig] = (),
) -> Work:
    case = Case("operator", DTYPE, rows=rows, n_out=out)
    s = case.scale
    drawn = compose_inputs(case, device)
    generator = torch.Generator(device).manual_seed(rank)
    z = torch.randn(rows, rank, device=device, generator=generator).bfloat16()
    lora_b = (torch.randn(out, rank, device=device, generator=generator) / rank**0.5).bfloat16()
    lora = z.double() @ lora_b.double().T
    # lora may be stored in bf16 between two kernels; its products are accumulated in fp32.
    lora_error = tolerances.rounding(lora, DTYPE) + tolerances.accumulation(
        rank, lora, tolerances.two_norm_of_products(z.double(), lora_b.double().T)
    )
    expected = {}
    for name, g in (("y", drawn.g), ("inner", torch.ones_like(drawn.g))):
        if name == "y" or want_inner:
            bound = tolerances.compose(drawn.base, lora, g, s, DTYPE)
            bound = bound + abs(g.double() * s) * lora_error
            expected[name] = Expectation(oracle.compose(drawn.base, lora, g, s), bound)
    sets = rotate([drawn.base, z, lora_b, drawn.g])
    jax_sets = to_jax([(base, z, b.T.contiguous(), g) for base, z, b, g in sets])
    jax_s = jnp.float32(s)
    del lora, lora_error

    def xla(base: jax.Array, z: jax.Array, lora_b: jax.Array, g: jax.Array):
        return define(base, z @ lora_b, g, jax_s, delta=False, want_inner=want_inner)

    def two_kernels(base: jax.Array, z: jax.Array, lora_b: jax.Array, g: jax.Array):
        return mosaic_compose.compose(
            base,
            z @ lora_b,
            g,
            jax_s,
            delta=False,
            want_inner=want_inner,
            sm_count=jax_device.sm_count(),
        )

    def fused(base: jax.Array, z: jax.Array, lora_b: jax.Array, g: jax.Array, config=None):
        return mosaic_expand.expand_compose(
            base,
            z,
            lora_b,
            g,
            jax_s,
            want_inner=want_inner,
            sm_count=jax_device.sm_count(),
            config=config,
        )

    def in_torch(implementation: str) -> Callable:
        @torch.no_grad()
        def step(base, z, lora_b, g):
            return torch_forward(
                base,
                F.linear(z, lora_b),
                g,
                None,
                s,
                delta=False,
                want_inner=want_inner,
                implementation=implementation,
            )

        return step

    @torch.no_grad()
    def torch_fused(base, z, lora_b, g):
        if want_inner:
            return triton_expand.expand_compose_with_inner(base, z, lora_b, g, None, s)
        return triton_expand.expand_compose(base, z, lora_b, g, None, s), None

    def jax_results(found):
        return {n: to_torch(a) for n, a in zip(("y", "inner"), found, strict=True) if a is not None}

    def torch_results(found):
        return {n: t for n, t in zip(("y", "inner"), found, strict=True) if t is not None}

    no_mosaic = mosaic_refuses(device)
    no_fused = no_mosaic or mosaic_expand.refuses(
        rows, rank, out, jnp.bfloat16, jnp.bfloat16, want_inner=want_inner
    )
    no_two = no_mosaic or rowwise.refuses(rows, out, jnp.bfloat16)
    no_triton = triton_refuses(device)
    return Work(
        "expand+compose+inner" if want_inner else "expand+compose",
        {"rows": rows, "out": out, "rank": rank},
        ((3 if want_inner else 2) * rows * out + rank * (rows + out)) * ITEM,
        2 * rows * rank * out,
        expected,
        [
            Variant("jax", "xla", xla, jax_sets, jax_results),
            Variant(
                "jax",
                "xla, mosaic compose",
                interpreted(two_kernels, device),
                jax_sets,
                jax_results,
                unless=no_two,
            ),
            *tuned(
                Variant(
                    "jax",
                    "mosaic",
                    fused,
                    jax_sets,
                    jax_results,
                    unless=no_fused,
                ),
                configs,
                device,
            ),
            Variant("torch", "eager", in_torch("eager"), sets, torch_results),
            Variant(
                "torch",
                "cuBLAS, triton compose",
                in_torch("triton"),
                sets,
                torch_results,
                exact=triton_is_exact(device),
                unless=no_triton,
            ),
            Variant(
                "torch",
                "triton",
                torch_fused,
                sets,
                torch_results,
                exact=triton_is_exact(device),
                unless=no_triton,
            ),
        ],
        {"jax xla": "jax xla", "torch eager": "torch eager"},
    )
