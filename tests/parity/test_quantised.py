"""The level `quantised`: sound in every format, and able to fail."""

import pytest

from parity import quantised, torchao_weights


@pytest.mark.parametrize("qtype", quantised.FORMATS)
def test_a_format_agrees_with_fp64(report, qtype):
    quantised.run(report, quantised.layers(quick=True)[0], qtype, "cpu")
    sides = [row["side"] for row in report.rows]
    assert {side: sides.count(side) for side in sides} == {"jax": 7, "torch": 7, "peft": 7}
    assert report.passed, [row for row in report.rows if not row["ok"]]


def test_a_scale_of_another_tile_is_caught(report, monkeypatch):
    from parity.sides.jax import operators

    def shifted(weight):
        found = torchao_weights.parts(weight)
        return found._replace(scale=found.scale[:, ::-1].copy())

    monkeypatch.setattr(operators, "parts", shifted)
    quantised.run(report, quantised.layers(quick=True)[0], "nf4", "cpu")
    failed = {(row["side"], row["quantity"]) for row in report.rows if not row["ok"]}
    assert {("jax", "norm"), ("jax", "y")} <= failed
    assert not any(side == "torch" for side, _ in failed)
