"""The gradient of SwiGLU of two DoRA layers, from dh, gate and up to both layers' d and d_g."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from benchmarks.ops.inputs import draw, mosaic_refuses, rotate, to_jax, to_torch, tuned
from benchmarks.work import Expectation, Variant, Work
from jax_dora.ops import device as jax_device
from jax_dora.ops.compose import Plan
from jax_dora.ops.compose import backward as compose_backward
from jax_dora.ops.mosaic import swiglu_backward as mosaic_backward
from jax_dora.ops.mosaic.rowwise import RowwiseConfig
from jax_dora.ops.swiglu import define_backward
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


def work(rows: int, out: int, device: str, configs: Sequence[RowwiseConfig] = ()) -> Work:
    dh, gate, up = (draw(device, n, rows, out)[0] for n in (1, 2, 3))
    gate_g, up_g = (1 + draw(device, n, out, size=0.1)[0].float() for n in (4, 5))
    operands = (gate, up, gate_g, up_g)
    bounds = tolerances.swiglu(dh, *operands, "bfloat16")
    exact = oracle.swiglu_grads(dh, *operands)
    expected = {
        name: Expectation(want, getattr(bounds, name))
        for name, want in zip(RESULTS, exact, strict=True)
    }

    def mosaic(dh, gate, up, gate_g, up_g, config=None):
        return mosaic_backward.swiglu_backward(
            *(dh, gate, up, gate_g, up_g), sm_count=jax_device.sm_count(), config=config
        )

    def xla(dh, gate, up, gate_g, up_g):
        d_gate, d_up, d_gate_g, _, d_up_g, _ = define_backward(
            *(dh, gate, up, gate_g, None, up_g, None)
        )
        return d_gate, d_up, d_gate_g, d_up_g

    def apart(by, dh, gate, up, gate_g, up_g, y1, y2):
        """SwiGLU's gradient by XLA, from the layers' results, then a compose's for each layer."""
        _, vjp = jax.vjp(lambda y1, y2: jax.nn.silu(y1) * y2, y1, y2)
        one = jnp.float32(1)
        (d_gate, _, d_gate_g), (d_up, _, d_up_g) = (
            compose_backward(Plan(False, "xla", by), dy, inner, g, one, want_lora=False)
            for dy, inner, g in zip(vjp(dh), (gate, up), (gate_g, up_g), strict=True)
        )
        return d_gate, d_up, d_gate_g, d_up_g

    def results(found):
        return {name: to_torch(array) for name, array in zip(RESULTS, found, strict=True)}

    sets = rotate([dh, *operands])
    inputs = to_jax(sets)

    def with_results(dh, gate, up, gate_g, up_g):
        y1, y2 = ((g * x.float()).to(x.dtype) for x, g in ((gate, gate_g), (up, up_g)))
        return dh, gate, up, gate_g, up_g, y1, y2

    both = to_jax([with_results(*one) for one in sets])
    not_here = None if device == "cuda" else "its kernels run inside of a compiled step"
    refusal = mosaic_refuses(device) or mosaic_backward.refuses(rows, out, jnp.bfloat16)
    return Work(
        "SwiGLU's gradient",
        {"rows": rows, "out": out},
        5 * rows * out * ITEM,
        0,
        expected,
        [
            Variant("jax", "xla", xla, inputs, results),
            *(
                Variant(
                    "jax",
                    f"apart, {by}",
                    functools.partial(apart, by),
                    both,
                    results,
                    exact=False,
                    unless=None if by == "xla" else refusal or not_here,
                )
                for by in ("xla", "mosaic")
            ),
            *tuned(
                Variant("jax", "mosaic", mosaic, inputs, results, unless=refusal), configs, device
            ),
        ],
        {"jax xla": "jax xla"},
    )
