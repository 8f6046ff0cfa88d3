"""Parity must be able to fail: errors planted in each package are caught, on the side at fault."""

import pytest

import torch_dora.ops
from parity.__main__ import main
from parity.faults import FAULTS, Fault
from parity.report import read
from parity.sides import SIDES
from tests.tables import thinned

NORM, NEAR_UNITY = "^norm 96x64 r64 float32", "^compose 7x72 bfloat16 near unity"
ZERO_ROWS, LAYER = "^norm 192x128 r16 float32 zero rows", "^layer 33x96x64 r16 float32$"
LAYER_ZERO_ROWS = "^layer 33x96x64 r16 float32 zero rows$"
# A fault, a case that must fail, a quantity that must be among those that do, and the side that
# `make test` plants it in, if any: interpreted, a whole layer takes longer than all operators.
CAUGHT = [
    ("eps_misplaced", ZERO_ROWS, "norm", "torch"),
    ("eps_misplaced", LAYER_ZERO_ROWS, "d_lora_b", None),
    ("g_rounded", NORM, "g", "torch"),
    ("g_rounded", NEAR_UNITY, "compose_delta y", None),
    ("g_rounded", LAYER, "y", None),
    ("cross_term_dropped", NORM, "norm", "jax"),
    ("cross_term_dropped", LAYER, "y", None),
    ("norm_attached", LAYER, "d_lora_b", "torch"),
    ("g_rounded_in_kernel", NEAR_UNITY, "compose_delta y", "jax"),
]
# Of these, what takes longest.
LONGEST = [CAUGHT[0], CAUGHT[7], CAUGHT[8]]


@pytest.mark.parametrize(
    ("name", "case", "quantity", "backend"),
    thinned(
        [(*caught, backend) for *caught, _ in CAUGHT for backend in SIDES],
        [caught for caught in CAUGHT if caught[-1] and caught not in LONGEST],
        LONGEST,
    ),
)
@pytest.mark.ci
def test_a_planted_error_is_caught(name, case, quantity, backend, tmp_path):
    with FAULTS[name].plant(backend):
        code = main(["--device", "cpu", "--case", case, "--out", str(tmp_path)])
    assert code == 1
    (file,) = tmp_path.iterdir()
    failed = [row for row in read(file)[1] if row["ok"] is False]
    assert quantity in {row["quantity"] for row in failed}
    assert not any(row["note"] for row in failed)
    # Of the other side nothing failed; what failed is the faulty one, or both's difference.
    assert all(backend in row["side"] for row in failed)


def test_every_fault_has_a_case():
    assert {name for name, *_ in CAUGHT} == FAULTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("backend", thinned(SIDES, ["jax"]))
def test_a_fault_leaves_nothing_behind(backend, tmp_path):
    for fault in FAULTS.values():
        with fault.plant(backend):
            pass
    assert main(["--device", "cpu", "--case", NORM, "--out", str(tmp_path)]) == 0


def test_a_fault_of_one_package_is_not_planted_in_the_other():
    fault = Fault("one_sided", "", (), {"jax_dora.ops.norm.ratio": lambda function: function})
    message = "has the points.*expected a function of torch_dora"
    with pytest.raises(ValueError, match=message), fault.plant("torch"):
        pass


def test_a_crash_is_a_failure(monkeypatch, tmp_path):
    def crash(*_, **__):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(torch_dora.ops, "compose", crash)
    code = main(["--device", "cpu", "--case", "^compose 5x43 float32", "--out", str(tmp_path)])
    assert code == 1
    notes = [row["note"] for row in read(tmp_path / "operator.jsonl")[1] if row["ok"] is False]
    assert any("RuntimeError: no such luck" in note for note in notes)
