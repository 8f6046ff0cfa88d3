"""The layer in JAX: plain XLA, and `jax_dora.ops.dora_linear`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax

from benchmarks import baselines
from benchmarks.arrays import NO_TRITON, rotate, to_jax, to_torch
from benchmarks.problem import Method, Problem
from benchmarks.work import Variant
from jax_dora import ops

Apply = Callable[..., jax.Array]
TRAINED = {
    "base": ("x",),
    "LoRA": ("x", "lora_a", "lora_b"),
    "DoRA": ("x", "lora_a", "lora_b", "magnitude"),
}


def variants(problem: Problem, every: bool, backward: bool) -> Iterator[Variant]:
    """Yields the variants, with XLA's Triton products and without; all of them if `every`."""
    i, s = problem.inputs, problem.scale
    fixed = to_jax([(*(t.T.contiguous() for t in (i.weight, i.lora_a, i.lora_b)), i.magnitude)])[0]
    kept = jax.jit(ops.factored_norm)(*fixed[:3], s)
    inputs = [(*fixed, kept, x, dy) for x, dy in to_jax(rotate([i.x, i.dy]))]

    def dora(implementation: str | None, with_norm: Callable[..., dict[str, Any]]) -> Apply:
        def apply(kernel, norm, *, x, lora_a, lora_b, magnitude):
            given = with_norm(kernel, lora_a, lora_b, norm)
            return ops.dora_linear(
                x, kernel, lora_a, lora_b, magnitude, s, implementation=implementation, **given
            )

        return apply

    def lora(kernel, norm, *, x, lora_a, lora_b):
        return x @ kernel + s * ((x @ lora_a) @ lora_b)

    def base(kernel, norm, *, x):
        return x @ kernel

    def computed(kernel, lora_a, lora_b, norm):
        return {}

    def computed_by_xla(kernel, lora_a, lora_b, norm):
        return {"norm": ops.factored_norm(kernel, lora_a, lora_b, s, implementation="xla")}

    def dense(kernel, lora_a, lora_b, norm):
        return {"norm": jax.lax.stop_gradient(baselines.dense_norm(kernel, lora_a, lora_b, s))}

    def norm_kept(kernel, lora_a, lora_b, norm):
        return {"norm": norm}

    rows: list[tuple[str, Method, Apply, bool, bool]] = [
        ("LoRA", "LoRA", lora, False, True),
        ("XLA DoRA", "DoRA", dora("xla", computed_by_xla), False, True),
        ("DoRA", "DoRA", dora(None, computed), False, True),
        ("DoRA, norm kept", "DoRA", dora(None, norm_kept), True, True),
        ("base", "base", base, False, False),
        ("XLA DoRA, dense norm", "DoRA", dora("xla", dense), False, False),
        ("XLA DoRA, norm kept", "DoRA", dora("xla", norm_kept), True, False),
    ]
    for name, method, apply, cached, always in rows:
        if not (every or always):
            continue
        variant = Variant(
            "jax",
            name,
            _step(apply, TRAINED[method], backward),
            inputs,
            _results,
            exact=method == "DoRA",
            flops=problem.flops(method, backward, method == "DoRA" and not cached),
            expected=problem.expected(method, backward),
            cached=cached,
        )
        yield replace(variant, name=f"{name} (no Triton)", compiler_options=NO_TRITON)
        if every:
            yield variant


def _step(apply: Apply, trained: tuple[str, ...], backward: bool) -> Callable:
    def step(kernel, lora_a, lora_b, magnitude, norm, x, dy):
        operands = {"x": x, "lora_a": lora_a, "lora_b": lora_b, "magnitude": magnitude}
        operands = {name: operands[name] for name in trained}
        if not backward:
            return {"y": apply(kernel, norm, **operands)}
        y, pull = jax.vjp(lambda some: apply(kernel, norm, **some), operands)
        return {"y": y} | {f"d_{name}": value for name, value in pull(dy)[0].items()}

    return step


def _results(found):
    return {
        name: to_torch(a).T if name in ("d_lora_a", "d_lora_b") else to_torch(a)
        for name, a in found.items()
    }
