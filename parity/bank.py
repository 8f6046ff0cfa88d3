"""`python -m parity bank`: a batch whose rows use different adapters, compared with fp64.

A projection and a bank of DoRA, LoRA and rsLoRA adapters of different ranks, on both sides. Every
row of a mixed batch is compared with the dense fp64 computation with its own adapter, within the
bounds of `parity.tolerances`. A row without an adapter must equal the base's result bit for bit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from flax import nnx

import jax_dora
import torch_dora
from parity import command, oracle, tolerances
from parity.compare import Expected, judge
from parity.report import Report
from parity.sides import Backend

KINDS = ("DoRA", "LoRA", "rsLoRA", "DoRA")
RANKS = (8, 5, 16, 64)
ALPHA = 3.0
# [rows] and [rows, time]: few rows of one token, rows of several, and enough rows of one token that
# the kernels group them.
SHAPES = ((9,), (6, 5), (40,))


class Adapter(NamedTuple):
    """An adapter of the projection, in PyTorch's layout; all values are representable in the
    dtype."""

    kind: str
    lora_a: np.ndarray
    lora_b: np.ndarray
    magnitude: np.ndarray
    scale: float

    @property
    def options(self) -> dict[str, Any]:
        """Returns the rank and the options that set the scale, as both packages name them."""
        use_rslora = self.kind == "rsLoRA"
        return {"rank": len(self.lora_a), "alpha": ALPHA, "use_rslora": use_rslora}


class Problem(NamedTuple):
    """A mixed batch.

    Attributes:
      name: the name of the case.
      x: [batch, *time, in].
      ids: [batch], the slot of each row, or -1.
    """

    name: str
    dtype: str
    weight: np.ndarray
    bias: np.ndarray
    adapters: list[Adapter]
    x: np.ndarray
    ids: np.ndarray


def problems(quick: bool) -> Iterator[Problem]:
    """Yields the cases."""
    for dtype in ("float32", "bfloat16"):
        for into, out in ((40, 24),) if quick else ((40, 24), (96, 200), (768, 512)):
            for shape in SHAPES:
                yield _problem(dtype, into, out, shape)


def _problem(dtype: str, into: int, out: int, shape: tuple[int, ...]) -> Problem:
    rng = np.random.default_rng([into, out, *shape])

    def draw(*sizes: int, deviation: float = 1.0) -> np.ndarray:
        drawn = deviation * rng.standard_normal(sizes).astype(np.float32)
        return drawn.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else drawn

    weight, adapters = draw(out, into, deviation=into**-0.5), []
    for kind, rank in zip(KINDS, RANKS, strict=True):
        lora_a, lora_b = draw(rank, into, deviation=into**-0.5), draw(out, rank, deviation=0.3)
        scale = ALPHA / (math.sqrt(rank) if kind == "rsLoRA" else rank)
        norm = oracle.norm(weight, lora_a, lora_b, scale).astype(np.float32)
        moved = 1 + 0.2 * rng.standard_normal(out).astype(np.float32)
        # LoRA is DoRA with the magnitude equal to the norm.
        magnitude = norm * moved if kind == "DoRA" else norm
        adapters.append(Adapter(kind, lora_a, lora_b, magnitude, scale))
    ids = rng.permutation(np.arange(shape[0]) % (len(KINDS) + 1)) - 1
    name = f"{dtype} {into}→{out}, {'×'.join(map(str, shape))} rows"
    return Problem(name, dtype, weight, draw(out), adapters, draw(*shape, into), ids)


def jax_rows(problem: Problem, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the rows with their adapters, the base's rows) from jax_dora on its default
    device."""
    out, into = problem.weight.shape
    base = nnx.Linear(into, out, param_dtype=problem.dtype, precision="highest", rngs=nnx.Rngs(0))
    base.kernel.set_value(jnp.asarray(problem.weight.T, problem.dtype))
    assert base.bias is not None
    base.bias.set_value(jnp.asarray(problem.bias, problem.dtype))
    bank = jax_dora.AdapterBank(base, len(problem.adapters) + 1, max(RANKS))
    for slot, adapter in enumerate(problem.adapters):
        arrays = {
            "lora_a": adapter.lora_a.T,
            "lora_b": adapter.lora_b.T,
            "magnitude": adapter.magnitude,
        }
        rule = jax_dora.DoRARule("", **adapter.options)
        bank = bank.load(slot, jax_dora.Adapter((rule,), {"": arrays}))
    graphdef, state = nnx.split(base)

    @jax.jit
    def rows(state: Any, bank: Any, ids: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return jax_dora.with_bank(model, bank, ids)(x), model(x)

    x = jnp.asarray(problem.x, problem.dtype)
    found, plain = rows(state, bank, jnp.asarray(problem.ids), x)
    return np.asarray(found, np.float64), np.asarray(plain, np.float64)


@torch.no_grad()
def torch_rows(problem: Problem, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the rows with their adapters, the base's rows) from torch_dora."""
    dtype = getattr(torch, problem.dtype)
    out, into = problem.weight.shape
    base = torch.nn.Linear(into, out, dtype=dtype, device=device)
    base.weight.copy_(torch.tensor(problem.weight))
    base.bias.copy_(torch.tensor(problem.bias))
    bank = torch_dora.AdapterBank(base, len(problem.adapters) + 1, max(RANKS), path=".*")
    for slot, adapter in enumerate(problem.adapters):
        layer = torch_dora.DoRALinear.from_linear(base, **adapter.options)
        for name in ("lora_a", "lora_b", "magnitude"):
            getattr(layer, name).copy_(torch.tensor(getattr(adapter, name)))
        bank.load(slot, layer)
    x = torch.tensor(problem.x).to(device, dtype)
    found = torch_dora.with_bank(base, bank, problem.ids.tolist())(x)
    return found.double().cpu().numpy(), base(x).double().cpu().numpy()


ROWS = {"jax": jax_rows, "torch": torch_rows}


def run(report: Report, problem: Problem, side: Backend, device: str) -> None:
    """Adds a line for each kind of adapter in a mixed batch, on one side."""
    found, plain = ROWS[side](problem, device)
    name, dtype, bias = problem.name, problem.dtype, problem.bias
    is_base = problem.ids == -1
    error = float(np.abs(found[is_base] - plain[is_base]).max())
    report.add(name, "y, the base alone", side=side, error=error, bound=0.0, ok=error == 0)
    for slot, adapter in enumerate(problem.adapters):
        in_slot = problem.ids == slot
        operands = (
            problem.weight,
            adapter.lora_a,
            adapter.lora_b,
            adapter.magnitude,
            adapter.scale,
        )
        x = problem.x[in_slot]
        exact = oracle.dora_linear(x, *operands, bias=bias, dtype=dtype)
        dy = np.zeros_like(exact)
        bound = tolerances.dora_linear(dy, x, *operands, dtype, bias=bias).y.reshape(exact.shape)
        # The base's result may be rounded with or without its bias.
        bound = bound + tolerances.rounding(exact - bias, dtype)
        quantity = f"y, {adapter.kind} of rank {len(adapter.lora_a)}"
        expected = {quantity: Expected(exact, bound, dtype)}
        judge(report, name, side, {quantity: found[in_slot]}, expected)


def main(options: argparse.Namespace) -> int:
    report = command.report(options, "bank")
    for problem in problems(options.quick):
        for side in ROWS:
            run(report, problem, side, options.device)
    return report.finish()
