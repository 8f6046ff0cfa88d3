"""Compose forward and backward over the paper's activation shapes, and the copy at each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import torch

from benchmarks.ops.inputs import mosaic_refuses, rotate, to_jax, to_torch, tuned
from benchmarks.work import Expectation, Variant, Work
from jax_dora.ops import device as jax_device
from jax_dora.ops.compose import Plan, define
from jax_dora.ops.compose import backward as jax_backward
from jax_dora.ops.mosaic import compose as mosaic_forward
from jax_dora.ops.mosaic import compose_backward as mosaic_backward
from jax_dora.ops.mosaic import rowwise
from jax_dora.ops.mosaic.rowwise import RowwiseConfig
from parity import oracle, tolerances
from parity.cases import PAPER_ACTIVATIONS, Case, ComposeInputs, compose_inputs
from torch_dora.ops import dispatch as torch_dispatch
from torch_dora.ops.compose import backward as torch_backward
from torch_dora.ops.compose import forward as torch_forward

DTYPE = "bfloat16"
ITEM = 2
QUICK_SHAPES = ((3, 64),)
XLA = Plan(False, "xla", "xla")


def works(device: str, quick: bool) -> Iterator[Callable[[], Work]]:
    for rows, out in QUICK_SHAPES if quick else PAPER_ACTIVATIONS:
        inputs = functools.cache(functools.partial(inputs_of, rows, out, device))
        yield functools.partial(_copy, rows, out, inputs)
        for want_inner in (False, True):
            yield functools.partial(forward, rows, out, device, inputs, want_inner)
        for want_lora in (True, False):
            yield functools.partial(backward, rows, out, device, inputs, want_lora)


def triton_refuses(device: str) -> str | None:
    """Why no Triton kernel runs on this device, or None."""
    call = torch_dispatch.Call(1, 8, 0, (torch.bfloat16,), device, False)
    return torch_dispatch.triton_refuses(call)


def triton_is_exact(device: str) -> bool:
    """Triton's interpreter, which runs on a CPU, truncates to bf16 instead of rounding."""
    return device == "cuda"


def inputs_of(rows: int, out: int, device: str) -> ComposeInputs:
    return compose_inputs(Case("operator", DTYPE, rows=rows, n_out=out), device)


def _copy(rows: int, out: int, inputs: Callable[[], ComposeInputs]) -> Work:
    base = inputs().base
    sets = rotate([base])
    expected = {"y": Expectation(-base.double(), torch.ones_like(base).double())}
    return Work(
        "copy",
        {"rows": rows, "out": out},
        2 * rows * out * ITEM,
        0,
        expected,
        [
            Variant("jax", "xla", jnp.negative, to_jax(sets), lambda y: {"y": to_torch(y)}),
            Variant("torch", "eager", torch.neg, sets, lambda y: {"y": y}),
        ],
    )


def forward(
    rows: int,
    out: int,
    device: str,
    inputs: Callable[[], ComposeInputs],
    want_inner: bool,
    configs: Sequence[RowwiseConfig] = (),
) -> Work:
    drawn = inputs()
    s = Case("operator", DTYPE, n_out=out).scale
    operands = (drawn.base, drawn.lora, drawn.g)
    expected = {
        "y": Expectation(oracle.compose(*operands, s), tolerances.compose(*operands, s, DTYPE))
    }
    if want_inner:
        # inner is y at g = 1.
        at_one = (drawn.base, drawn.lora, torch.ones_like(drawn.g))
        expected["inner"] = Expectation(
            oracle.compose(*at_one, s), tolerances.compose(*at_one, s, DTYPE)
        )
    sets = rotate(operands)
    jax_s = jnp.float32(s)

    def mosaic(base: jax.Array, lora: jax.Array, g: jax.Array, config=None):
        return mosaic_forward.compose(
            base,
            lora,
            g,
            jax_s,
            delta=False,
            want_inner=want_inner,
            sm_count=jax_device.sm_count(),
            config=config,
        )

    def xla(base: jax.Array, lora: jax.Array, g: jax.Array):
        return define(base, lora, g, jax_s, delta=False, want_inner=want_inner)

    def in_torch(implementation: str) -> Callable:
        @torch.no_grad()
        def step(base, lora, g):
            return torch_forward(
                base,
                lora,
                g,
                None,
                s,
                delta=False,
                want_inner=want_inner,
                implementation=implementation,
            )

        return step

    return Work(
        "compose+inner" if want_inner else "compose",
        {"rows": rows, "out": out},
        (4 if want_inner else 3) * rows * out * ITEM,
        0,
        expected,
        _variants(("y", "inner"), xla, mosaic, in_torch, sets, configs, device),
        {"jax xla": "jax xla", "torch eager": "torch eager"},
    )


def backward(
    rows: int,
    out: int,
    device: str,
    inputs: Callable[[], ComposeInputs],
    want_lora: bool,
    configs: Sequence[RowwiseConfig] = (),
) -> Work:
    drawn = inputs()
    s = Case("operator", DTYPE, n_out=out).scale
    grads = oracle.compose_grads(drawn.dy, drawn.base, drawn.lora, drawn.g, s)
    bounds = tolerances.compose_grads(drawn.dy, drawn.base, drawn.lora, drawn.g, s, DTYPE)
    names = ("d_base", "d_lora", "d_g") if want_lora else ("d_base", "d_g")
    expected = {n: Expectation(getattr(grads, n), getattr(bounds, n)) for n in names}
    inner = (drawn.base.float() + s * drawn.lora.float()).to(drawn.base.dtype)
    sets = rotate([drawn.dy, inner, drawn.g])
    jax_s = jnp.float32(s)

    def mosaic(dy: jax.Array, inner: jax.Array, g: jax.Array, config=None):
        return mosaic_backward.compose_backward(
            dy,
            inner,
            g,
            jax_s,
            delta=False,
            want_base=True,
            want_lora=want_lora,
            sm_count=jax_device.sm_count(),
            config=config,
        )

    def xla(dy: jax.Array, inner: jax.Array, g: jax.Array):
        return tuple(jax_backward(XLA, dy, inner, g, jax_s, want_lora=want_lora))

    def in_torch(implementation: str) -> Callable:
        @torch.no_grad()
        def step(dy, inner, g):
            return torch_backward(
                dy,
                inner,
                g,
                s,
                delta=False,
                want_base=True,
                want_lora=want_lora,
                implementation=implementation,
            )

        return step

    return Work(
        "backward" if want_lora else "backward, d_base",
        {"rows": rows, "out": out},
        (4 if want_lora else 3) * rows * out * ITEM,
        0,
        expected,
        _variants(("d_base", "d_lora", "d_g"), xla, mosaic, in_torch, sets, configs, device),
        {"jax xla": "jax xla", "torch eager": "torch eager"},
    )


def _variants(
    names: tuple[str, ...],
    xla: Callable,
    mosaic: Callable,
    in_torch: Callable[[str], Callable],
    sets: list[tuple[torch.Tensor, ...]],
    configs: Sequence[RowwiseConfig],
    device: str,
) -> list[Variant]:
    """Both frameworks' implementations; a step returns something or None for each of `names`."""
    jax_sets = to_jax(sets)
    rows, out = sets[0][0].shape

    def jax_results(found):
        return {n: to_torch(a) for n, a in zip(names, found, strict=True) if a is not None}

    def torch_results(found):
        return {n: t for n, t in zip(names, found, strict=True) if t is not None}

    refusal = mosaic_refuses(device) or rowwise.refuses(rows, out, jnp.bfloat16)
    return [
        Variant("jax", "xla", xla, jax_sets, jax_results),
        *tuned(
            Variant("jax", "mosaic", mosaic, jax_sets, jax_results, unless=refusal),
            configs,
            device,
        ),
        Variant("torch", "eager", in_torch("eager"), sets, torch_results),
        Variant(
            "torch",
            "triton",
            in_torch("triton"),
            sets,
            torch_results,
            exact=triton_is_exact(device),
            unless=triton_refuses(device),
        ),
    ]
