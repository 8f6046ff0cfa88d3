"""The level `bank`: sound on both sides, and able to fail."""

import itertools

import jax
import pytest

from parity import bank
from parity.faults import Fault, Point
from parity.report import Report
from tests.tables import thinned

SIDES = {"jax": bank.jax_rows, "torch": bank.torch_rows}
PROBLEMS = list(bank.problems(quick=True))


def another(checked):
    """Returns ids of which those above 0 are one too small: another customer's."""
    return lambda *arguments: (lambda ids: ids - 1 * (ids > 0))(checked(*arguments))


def of_the_base(norm):
    """Returns a norm that forgets the adapter."""
    return lambda w, lora_a, lora_b, scale, **options: norm(w, lora_a, 0 * lora_b, scale, **options)


FAULTS = {
    "another adapter": Fault(
        "another_adapter",
        "the next slot's adapter",
        (),
        {
            "jax": (Point("jax_dora.bank.bank", "checked_ids", another),),
            "torch": (Point("torch_dora.bank.layers", "_checked", another),),
        },
    ),
    "the base's norm": Fault(
        "norm_of_the_base",
        "g = m / ‖W‖",
        (),
        {
            "jax": (Point("jax_dora.ops", "factored_norm", of_the_base),),
            "torch": (Point("torch_dora.bank.bank", "factored_norm", of_the_base),),
        },
    ),
}


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "bank.jsonl", "bank", {})


def run(report, problem, side):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        bank.run(report, problem, side, SIDES[side])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_rows_agree_with_fp64(report, problem, side):
    run(report, problem, side)
    assert len(report.rows) == 1 + len(bank.KINDS)
    assert report.passed, [row for row in report.rows if not row["ok"]]


@pytest.mark.parametrize(
    ("fault", "side"),
    thinned(itertools.product(FAULTS, SIDES), zip(FAULTS, itertools.cycle(SIDES), strict=False)),
)
def test_faults_are_caught(report, fault, side):
    with FAULTS[fault].plant(side):
        run(report, PROBLEMS[0], side)
    assert not report.passed
    failed = {row["quantity"] for row in report.rows if not row["ok"]}
    assert "y, DoRA of rank 64" in failed
    assert "y, the base alone" not in failed
