"""The level `bank`: a batch whose rows use different adapters, compared with fp64.

A projection and a bank of DoRA, LoRA and rsLoRA adapters of different ranks, on both sides. PEFT
writes the adapters to folders, which both packages load; one adapter is loaded as an object. Every
row of a mixed batch is compared with the dense fp64 computation with its own adapter, within the
bounds of `parity.tolerances`. A row without an adapter must equal the base's result bit for bit.

PEFT itself computes the rows of one adapter at a time. Each package chooses its implementation
itself, so that on a GPU its kernels run.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parity import oracle, tolerances
from parity.bank_cases import Batch, Found, Problem, draw_problem
from parity.compare import Expected, judge
from parity.report import Report
from parity.sides import SIDES, Backend
from parity.sides.torch import peft_bank


def run(
    report: Report, batch: Batch, device: str, sides: Sequence[Backend] = (*SIDES, "peft")
) -> None:
    """Adds a line for each kind of adapter in a mixed batch, for every side and for PEFT."""
    problem = draw_problem(batch)
    expected = {
        slot: _expected(problem, slot, device)
        for slot in range(len(problem.adapters))
        if slot in problem.ids
    }
    with tempfile.TemporaryDirectory() as root:
        folders = peft_bank.save(problem, Path(root))
        for side in sides:
            module = peft_bank if side == "peft" else SIDES[side].bank
            try:
                found: Found = module.rows(problem, folders, device)
            except Exception as error:
                note = f"{type(error).__name__}: {error}"
                report.add(batch.name, "y", side=side, ok=False, note=note)
                continue
            _judge(report, batch, problem, side, found, expected)
            if device != "cpu" and found.kernels is not None and batch.dtype != "float32":
                judge_kernels(report, batch, side, found.kernels)


def judge_kernels(report: Report, batch: Batch, side: Backend, names: Sequence[str]) -> None:
    """Adds the names of a side's kernels; it is an error if none of them reads the bank."""
    ok = any(name.startswith("bank_") for name in names)
    report.add(batch.name, "kernels that ran", side=side, value=", ".join(names), ok=ok)


def _judge(
    report: Report,
    batch: Batch,
    problem: Problem,
    side: Backend,
    found: Found,
    expected: Mapping[int, Expected],
) -> None:
    is_base = problem.ids == -1
    if found.base is not None and is_base.any():
        error = float(np.abs(found.rows[is_base] - found.base[is_base]).max())
        values = {"error": error, "bound": 0.0, "ok": error == 0}
        report.add(batch.name, "y, the base alone", side=side, **values)
    for slot, exact in expected.items():
        adapter = problem.adapters[slot]
        quantity = f"y, {adapter.kind} of rank {len(adapter.lora_a)}"
        rows = found.rows[problem.ids == slot]
        judge(report, batch.name, side, {quantity: rows}, {quantity: exact})


def _expected(problem: Problem, slot: int, device: str) -> Expected:
    """Returns the rows of a slot, computed on the device."""
    adapter, dtype = problem.adapters[slot], problem.dtype

    def move(array: np.ndarray | None) -> Any:
        return None if array is None else torch.as_tensor(array, device=device)

    matrices = (problem.weight, adapter.lora_a, adapter.lora_b, adapter.magnitude)
    weight, lora_a, lora_b, magnitude = map(move, matrices)
    operands = weight, lora_a, lora_b, magnitude, adapter.scale
    bias = move(problem.bias)
    x = move(problem.x[problem.ids == slot])
    exact = oracle.dora_linear(x, *operands, bias=bias, dtype=dtype)
    bounds = tolerances.dora_linear(0 * exact, x, *operands, dtype, bias=bias)
    # The base's result may be rounded with or without its bias.
    bound = bounds.y.reshape(exact.shape) + tolerances.rounding(exact - bias, dtype)
    return Expected(exact.cpu().numpy(), bound.cpu().numpy(), dtype)
