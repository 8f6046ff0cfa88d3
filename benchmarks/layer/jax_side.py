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

    def dora(implementation: str | None, norm_of: Callable[..., jax.Array | None]) -> Apply:
        def apply(kernel, kept, *, x, lora_a, lora_b, magnitude):
            options = {
                "implementation": implementation,
                "norm": norm_of(kernel, lora_a, lora_b, kept),
            }
            return ops.dora_linear(x, kernel, lora_a, lora_b, magnitude, s, **options)

        return apply

    def lora(kernel, kept, *, x, lora_a, lora_b):
        return x @ kernel + s * ((x @ lora_a) @ lora_b)

    def by_xla(kernel, lora_a, lora_b, kept):
        return ops.factored_norm(kernel, lora_a, lora_b, s, implementation="xla")

    rows: list[tuple[str, Method, Apply, bool]] = [
        ("LoRA", "LoRA", lora, False),
        ("XLA DoRA", "DoRA", dora("xla", by_xla), False),
        ("DoRA", "DoRA", dora(None, lambda *_: None), False),
        ("DoRA, norm kept", "DoRA", dora(None, lambda *operands: operands[-1]), True),
    ]
    for name, method, apply, norm_kept in rows:
        variant = Variant(
            "jax",
            name,
            _step(apply, TRAINED[method], backward),
            inputs,
            _results,
            exact=method == "DoRA",
            flops=problem.flops(backward, method == "DoRA" and not norm_kept),
            expected=problem.expected(method, backward),
        )
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
