"""`python -m parity bank`: rows that choose their adapters, each held to that one alone in fp64.

A projection and a bank of DoRA, LoRA and rsLoRA adapters of different ranks, on both sides. Every
row of a mixed batch is held to the materialised fp64 computation with its own adapter, by the
bounds of `parity.tolerances`; a row of the base alone is held to the base's own bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parity import command
from parity.environment import choose_device

if TYPE_CHECKING:
    from parity.report import Report


class Adapter(NamedTuple):
    """An adapter of the projection, in PyTorch's layout, of numbers that the dtype holds."""

    kind: str
    lora_a: Any
    lora_b: Any
    magnitude: Any
    alpha: float

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rsLoRA" else self.rank)


class Problem(NamedTuple):
    """A mixed batch.

    Attributes:
      name: of the case.
      x: [batch, *time, in].
      ids: of its rows.
    """

    name: str
    dtype: str
    weight: Any
    bias: Any
    adapters: list[Adapter]
    x: Any
    ids: Any


KINDS = ("DoRA", "LoRA", "rsLoRA", "DoRA")
RANKS = (8, 5, 16, 64)
# One token a row; several; and so many rows of one that they are sorted.
SHAPES = ((9,), (6, 5), (40,))


def problems(quick: bool) -> Iterator[Problem]:
    """Yields the cases."""
    for dtype in ("float32", "bfloat16"):
        for into, out in ((40, 24),) if quick else ((40, 24), (96, 200), (768, 512)):
            for shape in SHAPES:
                yield _problem(dtype, into, out, shape)


def _problem(dtype: str, into: int, out: int, shape: tuple[int, ...]) -> Problem:
    import ml_dtypes

    from parity import oracle

    rng = np.random.default_rng([into, out, *shape])

    def draw(*sizes: int, deviation: float = 1.0) -> Any:
        drawn = deviation * rng.standard_normal(sizes).astype(np.float32)
        return drawn.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else drawn

    weight, adapters = draw(out, into, deviation=into**-0.5), []
    for kind, rank in zip(KINDS, RANKS, strict=True):
        lora_a, lora_b = draw(rank, into, deviation=into**-0.5), draw(out, rank, deviation=0.3)
        one = Adapter(kind, lora_a, lora_b, None, 3.0)
        norm = oracle.norm(weight, lora_a, lora_b, one.scale).astype(np.float32)
        moved = 1 + 0.2 * rng.standard_normal(out).astype(np.float32)
        # LoRA is the DoRA whose magnitude is its norm.
        adapters.append(one._replace(magnitude=norm * moved if kind == "DoRA" else norm))
    ids = rng.permutation(np.arange(shape[0]) % (len(KINDS) + 1)) - 1
    told = "×".join(map(str, shape))
    return Problem(
        f"{dtype} {into}→{out}, {told} rows",
        dtype,
        weight,
        draw(out),
        adapters,
        draw(*shape, into),
        ids,
    )


def jax_rows(problem: Problem) -> tuple[Any, Any]:
    """Returns the rows with their adapters, and the base's, by jax_dora."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jax_dora

    out, into = problem.weight.shape
    base = nnx.Linear(into, out, param_dtype=problem.dtype, precision="highest", rngs=nnx.Rngs(0))
    base.kernel.set_value(jnp.asarray(problem.weight.T, problem.dtype))
    assert base.bias is not None
    base.bias.set_value(jnp.asarray(problem.bias, problem.dtype))
    bank = jax_dora.AdapterBank(base, len(problem.adapters) + 1, max(RANKS))
    for slot, one in enumerate(problem.adapters):
        rule = jax_dora.DoRARule("", one.rank, one.alpha, use_rslora=one.kind == "rsLoRA")
        arrays = {"lora_a": one.lora_a.T, "lora_b": one.lora_b.T, "magnitude": one.magnitude}
        bank = bank.load(slot, jax_dora.Adapter((rule,), {"": arrays}))
    graphdef, state = nnx.split(base)

    @jax.jit
    def run(state: Any, bank: Any, ids: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return jax_dora.with_bank(model, bank, ids)(x), model(x)

    x = jnp.asarray(problem.x, problem.dtype)
    found, plain = run(state, bank, jnp.asarray(problem.ids), x)
    return np.asarray(found, np.float64), np.asarray(plain, np.float64)


def torch_rows(problem: Problem, device: str = "cpu") -> tuple[Any, Any]:
    """Returns the rows with their adapters, and the base's, by torch_dora."""
    import torch
    from torch import nn

    import torch_dora

    dtype = getattr(torch, problem.dtype)
    out, into = problem.weight.shape
    base = nn.Linear(into, out, dtype=dtype, device=device)
    with torch.no_grad():
        base.weight.copy_(torch.tensor(problem.weight))
        assert base.bias is not None
        base.bias.copy_(torch.tensor(problem.bias))
        bank = torch_dora.AdapterBank(base, len(problem.adapters) + 1, max(RANKS), path=".*")
        for slot, one in enumerate(problem.adapters):
            options = {"rank": one.rank, "alpha": one.alpha, "use_rslora": one.kind == "rsLoRA"}
            layer = torch_dora.DoRALinear.from_linear(base, **options)
            for name in ("lora_a", "lora_b", "magnitude"):
                getattr(layer, name).copy_(torch.tensor(getattr(one, name)))
            bank.load(slot, layer)
        x = torch.tensor(problem.x).to(device, dtype)
        found = torch_dora.with_bank(base, bank, problem.ids.tolist())(x)
        return found.double().cpu().numpy(), base(x).double().cpu().numpy()


def run(report: Report, problem: Problem, side: str, rows: Callable[..., Any]) -> None:
    """Adds a line for each kind of adapter in a mixed batch, on one side."""
    from parity import oracle, tolerances
    from parity.compare import judge

    found, plain = rows(problem)
    alone = problem.ids == -1
    different = float(np.abs(found[alone] - plain[alone]).max())
    report.add(
        problem.name, "y, the base alone", side=side, error=different, bound=0.0, ok=different == 0
    )
    for slot, one in enumerate(problem.adapters):
        mine = problem.ids == slot
        operands = (problem.weight, one.lora_a, one.lora_b, one.magnitude, one.scale)
        x = problem.x[mine]
        exact = oracle.dora_linear(x, *operands, bias=problem.bias, dtype=problem.dtype)
        bound = tolerances.dora_linear(
            np.zeros_like(exact), x, *operands, problem.dtype, bias=problem.bias
        ).y.reshape(exact.shape)
        # The base's result may be stored with its bias, or the bias be added to a rounded one.
        bound = bound + tolerances.rounding(exact - problem.bias, problem.dtype)
        quantity = f"y, {one.kind} of rank {one.rank}"
        judge(report, problem.name, quantity, side, found[mine], exact, bound)


def main(arguments: Sequence[str]) -> int:
    parser = command.parser("bank", "Holds the rows of mixed batches to fp64, each by its adapter.")
    options = parser.parse_args(list(arguments))
    device = choose_device(options.device)
    report = command.report(options, device, "bank")
    for problem in problems(options.quick):
        run(report, problem, "jax", jax_rows)
        run(report, problem, "torch", lambda one: torch_rows(one, device))
    return report.finish()
