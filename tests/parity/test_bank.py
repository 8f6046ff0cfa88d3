"""The level `bank`: sound on both sides, and able to fail."""

import itertools

import pytest

from parity import bank
from parity.faults import Fault
from tests.tables import thinned

PROBLEMS = list(bank.problems(quick=True))


def another(checked):
    """Returns ids of which those above 0 are one too small: another customer's."""
    return lambda *arguments: (lambda ids: ids - 1 * (ids > 0))(checked(*arguments))


def of_the_base(norm):
    """Returns a norm that forgets the adapter."""
    return lambda w, lora_a, lora_b, scale, **options: norm(w, lora_a, 0 * lora_b, scale, **options)


FAULTS = {
    "the next slot's adapter": {
        "jax_dora.bank.bank.checked_ids": another,
        "torch_dora.bank.layers._as_ids": another,
    },
    "the base's norm": {
        "jax_dora.ops.factored_norm": of_the_base,
        "torch_dora.bank.bank.factored_norm": of_the_base,
    },
}


@pytest.mark.parametrize("side", bank.ROWS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_rows_agree_with_fp64(report, problem, side):
    bank.run(report, problem, side, "cpu")
    assert len(report.rows) == 1 + len(bank.KINDS)
    assert report.passed, [row for row in report.rows if not row["ok"]]


@pytest.mark.parametrize(
    ("fault", "side"),
    thinned(itertools.product(FAULTS, bank.ROWS), zip(FAULTS, bank.ROWS, strict=True)),
)
def test_faults_are_caught(report, fault, side):
    with Fault(fault, fault, (), FAULTS[fault]).plant(side):
        bank.run(report, PROBLEMS[0], side, "cpu")
    assert not report.passed
    failed = {row["quantity"] for row in report.rows if not row["ok"]}
    assert "y, DoRA of rank 64" in failed
    assert "y, the base alone" not in failed
