"""The controls: levels answer with what failed, and the command fails where a fault gets by."""

import pytest

from parity.__main__ import main
from parity.command import CONTROLLED
from parity.controls import CASE_SETS, run_controls
from parity.faults import FAULTS
from parity.report import Report, read, text


@pytest.mark.slow
@pytest.mark.parametrize(("level", "fault"), [("layer", "norm_attached"), ("model", "g_rounded")])
def test_a_level_catches_a_fault(level, fault, tmp_path):
    arguments = ["controls", "--level", level, "--fault", fault, "--out", str(tmp_path)]
    assert main(arguments) == 0
    header, rows = read(tmp_path / "controls.jsonl")
    found = [(row["case"], row["side"], bool(row["failed"]), row["blamed"]) for row in rows]
    assert found == [
        ("none", None, False, True),
        (fault, "jax", True, True),
        (fault, "torch", True, True),
    ]
    assert text(header, rows).count("**caught**") == 2


def controls(case_set, fault="cross_term_dropped", level="layer"):
    report = Report(None, "controls", {})
    run_controls(report, {level: case_set}, [FAULTS[fault]])
    return report


def failing(side, sound=False):
    """Returns a case set in which a comparison of `side` fails; not without a fault, if `sound`."""

    def case_set(report, backend):
        report.add("case", "y", side=side, ok=sound and backend is None)

    return case_set


@pytest.mark.slow
def test_a_fault_that_gets_by_fails():
    report = controls(lambda case_set, backend: None)
    assert not report.passed
    assert "MISSED" in text(report.header, report.rows)
    assert [row["ok"] for row in report.rows] == [True, False, False]


def test_a_fault_need_not_be_caught_everywhere():
    assert controls(lambda case_set, backend: None, "norm_attached", "operator").passed


def test_sound_packages_that_fail_fail():
    assert not controls(failing("jax xla, torch eager")).passed


def test_blaming_the_other_package_fails():
    report = controls(failing("torch triton", sound=True))
    assert [row["ok"] for row in report.rows] == [True, False, True]
    assert "WRONG SIDE" in text(report.header, report.rows)


def test_a_crash_is_no_catch():
    def crash(case_set, backend):
        if backend:
            raise RuntimeError("no such luck")

    report = controls(crash)
    assert not report.passed
    assert "RuntimeError: no such luck" in text(report.header, report.rows)


def test_an_unknown_fault_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="there are eps_misplaced"):
        main(["controls", "--fault", "gremlins", "--out", str(tmp_path)])


def test_every_fault_must_be_caught_somewhere():
    assert tuple(CASE_SETS) == CONTROLLED
    for fault in FAULTS.values():
        assert fault.caught_by
        assert set(fault.caught_by) <= set(CASE_SETS)
