"""Compose forward and backward over the paper's activation shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import torch

from benchmarks.arrays import interpreted, pullback, raising, rotate, to_jax
from benchmarks.work import Expectation, Variant, Work
from jax_dora import ops as jax_ops
from parity import oracle, tolerances
from parity.cases import PAPER_ACTIVATIONS, Case, ComposeInputs, compose_inputs
from torch_dora import ops as torch_ops

DTYPE = "bfloat16"
ITEM = 2
QUICK_SHAPES = ((3, 64),)
BASELINES = {"jax xla": "jax xla", "torch eager": "torch eager"}


def works(device: str, quick: bool) -> Iterator[Callable[[], Work]]:
    for rows, out in QUICK_SHAPES if quick else PAPER_ACTIVATIONS:
        case = Case("operator", DTYPE, rows=rows, n_out=out)
        inputs = functools.cache(functools.partial(compose_inputs, case, device))
        yield functools.partial(forward, case, device, inputs)
        for with_lora in (True, False):
            yield functools.partial(backward, case, device, inputs, with_lora)


def forward(case: Case, device: str, inputs: Callable[[], ComposeInputs]) -> Work:
    """Returns the work of y, in inference."""
    drawn, s = inputs(), case.scale
    operands = (drawn.base, drawn.lora, drawn.g)
    sets = rotate(operands)
    jax_sets = to_jax(sets)

    def in_jax(name: str) -> Variant:
        step = interpreted(lambda base, lora, g: _compose(base, g, lora, s, name), device)
        return Variant("jax", name, step, jax_sets)

    def in_torch(name: str) -> Variant:
        def step(base, lora, g):
            return torch_ops.compose(base, lora, g, s, implementation=name)

        return _in_torch(name, step, sets, device)

    expected = Expectation(oracle.compose(*operands, s), tolerances.compose(*operands, s, DTYPE))
    return Work(
        "compose",
        {"rows": case.rows, "out": case.n_out},
        3 * case.rows * case.n_out * ITEM,
        0,
        {"y": expected},
        [in_jax("xla"), in_jax("mosaic"), in_torch("eager"), in_torch("triton")],
        BASELINES,
    )


def backward(case: Case, device: str, inputs: Callable[[], ComposeInputs], with_lora: bool) -> Work:
    """Returns the work of the gradients, from dy and inner alone."""
    drawn, s = inputs(), case.scale
    grads = oracle.compose_grads(drawn.dy, drawn.base, drawn.lora, drawn.g, s)
    bounds = tolerances.compose_grads(drawn.dy, drawn.base, drawn.lora, drawn.g, s, DTYPE)
    names = ("d_base", "d_g", "d_lora") if with_lora else ("d_base", "d_g")
    sets = rotate([drawn.dy, drawn.base, drawn.lora, drawn.g])

    def in_jax(name: str) -> Variant:
        def vjp(base, lora, g):
            if with_lora:
                return jax.vjp(functools.partial(_compose, s=s, name=name), base, g, lora)
            return jax.vjp(functools.partial(_compose, lora=lora, s=s, name=name), base, g)

        step, kept = pullback(vjp, to_jax(sets), device)
        return Variant("jax", name, step, kept)

    def in_torch(name: str) -> Variant:
        def kept(dy, base, lora, g):
            leaves = [t.clone().requires_grad_() for t in (base, g)]
            lora = lora.clone().requires_grad_(with_lora)
            y = torch_ops.compose(leaves[0], lora, leaves[1], s, implementation=name)
            return y, [*leaves, lora] if with_lora else leaves, dy

        def step(y, leaves, dy):
            return torch.autograd.grad(y, leaves, dy, retain_graph=True)

        try:
            return _in_torch(name, step, [kept(*one) for one in sets], device)
        except Exception as error:
            return Variant("torch", name, raising(error), sets)

    return Work(
        "backward" if with_lora else "backward, d_base",
        {"rows": case.rows, "out": case.n_out},
        (4 if with_lora else 3) * case.rows * case.n_out * ITEM,
        0,
        {n: Expectation(getattr(grads, n), getattr(bounds, n)) for n in names},
        [in_jax("xla"), in_jax("mosaic"), in_torch("eager"), in_torch("triton")],
        BASELINES,
    )


def _compose(base, g, lora, s: float, name: str) -> jax.Array:
    return jax_ops.compose(base, lora, g, s, implementation=name)


def _in_torch(name: str, step: Callable, sets: list, device: str) -> Variant:
    # Triton's interpreter, which runs on a CPU, truncates to bf16 instead of rounding.
    exact = name == "eager" or device == "cuda"
    return Variant("torch", name, step, sets, exact=exact)
