"""The level `quantised`: sound in every format, and able to fail."""

import pytest

from parity import quantised
from parity.report import Report
from parity.sides.torch import peft_layer


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "quantised.jsonl", "quantised", {})


@pytest.mark.parametrize("qtype", quantised.FORMATS)
def test_a_format_agrees_with_fp64(report, qtype):
    quantised.run(report, quantised.cases(quick=True)[0], qtype, "cpu")
    ours = [row for row in report.rows if row["side"] != "peft"]
    theirs = [row for row in report.rows if row["side"] == "peft"]
    assert len(ours) == 14
    judged = [row for row in theirs if row["ok"] is not None]
    assert len(judged) == (0 if peft_layer.refuses(qtype) else 7)
    assert len(theirs) == max(len(judged), 1)
    assert report.passed, [row for row in report.rows if not row["ok"]]


def test_a_scale_of_another_tile_is_caught(report, monkeypatch):
    from parity.sides.jax import operators

    def shifted(weight):
        found = quantised.parts(weight)
        return found._replace(scale=found.scale[:, ::-1].copy())

    monkeypatch.setattr(operators, "parts", shifted)
    quantised.run(report, quantised.cases(quick=True)[0], "nf4", "cpu")
    failed = {(row["side"], row["quantity"]) for row in report.rows if not row["ok"]}
    assert {("jax", "norm"), ("jax", "y")} <= failed
    assert not any(side == "torch" for side, _ in failed)
