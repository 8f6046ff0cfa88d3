"""The layer in JAX: plain XLA, and `jax_dora.ops.dora_linear`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax

from benchmarks.arrays import NO_TRITON, rotate, to_jax, to_torch
from benchmarks.problem import Method, Problem
from benchmarks.work import Variant
from jax_dora import ops
from parity.sides.jax.operators import with_gradients

Apply = Callable[..., jax.Array]
TRAINED = {
    "LoRA": ("x", "lora_a", "lora_b"),
    "DoRA": ("x", "lora_a", "lora_b", "magnitude"),
}


def variants(problem: Problem, every: bool, backward: bool) -> Iterator[Variant]:
    """Yields the variants, with XLA's Triton products and without; all of them if `every`."""
    i, s = problem.inputs, problem.scale
    fixed = to_jax([(*(t.T.contiguous() for t in (i.weight, i.lora_a, i.lora_b)), i.magnitude)])[0]
    kept = jax.jit(ops.factored_norm)(*fixed[:3], s)
    inputs = [(*fixed, kept, x, dy) for x, dy in to_jax(rotate([i.x, i.dy]))]

    def lora(kernel, norm, *, x, lora_a, lora_b):
        return x @ kernel + s * ((x @ lora_a) @ lora_b)

    def dora(kernel, norm, *, x, lora_a, lora_b, magnitude):
        return ops.dora_linear(x, kernel, lora_a, lora_b, magnitude, s)

    def norm_kept(kernel, norm, *, x, lora_a, lora_b, magnitude):
        return ops.dora_linear(x, kernel, lora_a, lora_b, magnitude, s, norm=norm)

    def by_xla(kernel, norm, *, x, lora_a, lora_b, magnitude):
        norm = ops.factored_norm(kernel, lora_a, lora_b, s, implementation="xla")
        options = {"norm": norm, "implementation": "xla"}
        return ops.dora_linear(x, kernel, lora_a, lora_b, magnitude, s, **options)

    rows: list[tuple[str, Method, Apply]] = [
        ("LoRA", "LoRA", lora),
        ("XLA DoRA", "DoRA", by_xla),
        ("DoRA", "DoRA", dora),
        ("DoRA, norm kept", "DoRA", norm_kept),
    ]
    for name, method, apply in rows:
        step = _step(apply, TRAINED[method], backward)
        asked = problem.asked(method, backward, apply is norm_kept)
        variant = Variant("jax", name, step, inputs, _results, method == "DoRA", **asked)
        yield replace(variant, name=f"{name} (no Triton)", compiler_options=NO_TRITON)
        if every:
            yield variant


def _step(apply: Apply, trained: tuple[str, ...], backward: bool) -> Callable:
    def step(kernel, lora_a, lora_b, magnitude, norm, x, dy):
        operands = {"x": x, "lora_a": lora_a, "lora_b": lora_b, "magnitude": magnitude}
        operands = {name: operands[name] for name in trained}
        op = functools.partial(apply, kernel, norm)
        if not backward:
            return {"y": op(**operands)}
        return with_gradients({"": op}, trained, operands, dy)

    return step


def _results(found):
    return {
        name: to_torch(a).T if name in ("d_lora_a", "d_lora_b") else to_torch(a)
        for name, a in found.items()
    }
