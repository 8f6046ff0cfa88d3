"""The level `bank`: sound on both sides and in PEFT, and able to fail."""

import itertools

import pytest

from parity import bank, bank_cases
from parity.faults import Fault
from parity.sides import SIDES
from parity.sides.torch import peft_bank
from tests.tables import thinned

BATCHES = list(bank_cases.batches("cpu", quick=True))
EXACT = next(batch for batch in BATCHES if batch.dtype == "float32")


def another(checked):
    """Returns ids of which those above 0 are one too small: another customer's."""
    return lambda *arguments: (lambda ids: ids - 1 * (ids > 0))(checked(*arguments))


def of_the_base(norm):
    """Returns a norm that forgets the adapter."""
    return lambda w, lora_a, lora_b, scale, **options: norm(w, lora_a, 0 * lora_b, scale, **options)


def as_lora(adapter_scale):
    """Returns a scale that divides by the rank, also for rsLoRA."""
    return lambda rank, alpha, use_rslora: adapter_scale(rank, alpha, False)


def of_lora_in_jax(facts):
    """Returns the facts with a g of LoRA that is not 1."""

    def faulty(*arguments):
        found = facts(*arguments)
        found.magnitude[~found.is_dora] *= 1.001
        return found

    return faulty


def of_lora_in_torch(g):
    """Returns g, which for LoRA is not 1."""
    return lambda *of: g(*of) * (1.001 if of[-1].magnitude is None else 1)


# What is wrong, where, and what fails.
FAULTS = {
    "the next slot's adapter": (
        {
            "jax_dora.bank.adapter_bank.checked_ids": another,
            "torch_dora.bank.bank_layers._as_ids": another,
        },
        {"y, LoRA of rank 5", "y, rsLoRA of rank 16", "y, DoRA of rank 64"},
    ),
    "the base's norm": (
        {
            "jax_dora.ops.factored_norm": of_the_base,
            "torch_dora.bank.adapter_bank.factored_norm": of_the_base,
        },
        {"y, DoRA of rank 8", "y, DoRA of rank 64"},
    ),
    "rsLoRA's scale": (
        {
            "jax_dora.bank.host.adapter_scale": as_lora,
            "torch_dora.bank.adapter_bank.adapter_scale": as_lora,
        },
        {"y, rsLoRA of rank 16"},
    ),
    "LoRA's g": (
        {
            "jax_dora.bank.host._facts": of_lora_in_jax,
            "torch_dora.bank.adapter_bank._g": of_lora_in_torch,
        },
        {"y, LoRA of rank 5", "y, rsLoRA of rank 16"},
    ),
}


QUICK = [*zip(FAULTS, itertools.cycle(SIDES), strict=False)]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
@pytest.mark.ci
def test_rows_agree_with_fp64(report, batch):
    bank.run(report, batch, "cpu")
    sides = [row["side"] for row in report.rows]
    kinds = len(bank_cases.KINDS)
    # PEFT computes no mixed batch.
    assert {side: sides.count(side) for side in sides} == {
        "jax": 1 + kinds,
        "torch": 1 + kinds,
        "peft": kinds,
    }
    assert report.passed, [row for row in report.rows if not row["ok"]]


@pytest.mark.parametrize(
    ("fault", "side"),
    thinned(itertools.product(FAULTS, SIDES), QUICK[1:], QUICK[:1]),
)
@pytest.mark.ci
def test_faults_are_caught(report, fault, side):
    points, expected = FAULTS[fault]
    with Fault(fault, fault, (), points).plant(side):
        bank.run(report, EXACT, "cpu", (side,))
    assert {row["quantity"] for row in report.rows if not row["ok"]} == expected


def test_peft_with_another_adapter_is_caught(report, monkeypatch):
    rows = peft_bank.rows
    monkeypatch.setattr(
        peft_bank, "rows", lambda problem, folders, device: rows(problem, folders[::-1], device)
    )
    bank.run(report, EXACT, "cpu")
    failed = {row["side"]: row for row in report.rows if not row["ok"]}
    assert list(failed) == ["peft"]


def test_a_crash_is_a_failure(report, monkeypatch):
    def crash(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(peft_bank, "rows", crash)
    bank.run(report, EXACT, "cpu", ("peft",))
    assert [(row["ok"], row["note"]) for row in report.rows] == [
        (False, "RuntimeError: no such luck")
    ]


@pytest.mark.parametrize(("names", "ok"), [(["bank_rows", "compose"], True), (["compose"], False)])
def test_a_batch_without_a_kernel_is_caught(report, names, ok):
    bank.judge_kernels(report, EXACT, "jax", names)
    assert report.passed is ok


def test_lora_has_no_magnitude():
    problem = bank_cases.draw_problem(EXACT)
    assert [one.kind for one in problem.adapters if one.magnitude is None] == ["LoRA", "rsLoRA"]
    assert all(one.from_folder for one in problem.adapters if one.magnitude is None)


def test_a_gpu_runs_rows_and_prompts():
    batches = list(bank_cases.batches("cuda", quick=False))
    shapes = {batch.shape for batch in batches if batch.dtype == "bfloat16"}
    assert {(1,), (8,), (64,), (128,)} < shapes
    assert any(len(shape) == 2 and shape[1] >= 1024 for shape in shapes)
    assert min(min(batch.into, batch.out) for batch in batches) >= 1024
