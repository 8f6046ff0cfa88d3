"""The controls: levels answer with what failed, and the command fails where a fault gets by."""

import json

import pytest

from parity import faults as planted
from parity.__main__ import main
from parity.controls import run_controls
from parity.levels import Failure, levels


@pytest.mark.parametrize(
    ("level", "fault"),
    [("layer", "norm_attached"), ("model", "g_rounded")],
)
def test_a_level_catches_a_fault(level, fault, tmp_path):
    arguments = ["controls", "--level", level, "--fault", fault, "--out", str(tmp_path)]
    assert main(arguments) == 0
    outcomes = json.loads((tmp_path / "controls.json").read_text())["outcomes"]
    found = [(o["fault"], o["backend"], o["caught"], o["blamed"]) for o in outcomes]
    assert found == [
        ("none", None, False, True),
        (fault, "jax", True, True),
        (fault, "torch", True, True),
    ]
    assert "**caught**" in (tmp_path / "controls.md").read_text()


def _controls(failures, fault="cross_term_dropped", level="layer"):
    return run_controls({level: failures}, {fault: planted.FAULTS[fault]}, lambda line: None)


def test_a_fault_that_gets_by_fails():
    report = _controls(lambda backend: [])
    assert not report.passed
    assert "MISSED" in report.markdown()
    assert [o.passed for o in report.outcomes] == [True, False, False]


def test_a_fault_need_not_be_caught_everywhere():
    assert _controls(lambda backend: [], "norm_attached", "operator").passed


def test_sound_packages_that_fail_fail():
    assert not _controls(lambda backend: [Failure("y")]).passed


def test_blaming_the_other_package_fails():
    report = _controls(lambda backend: [Failure("y", "torch")] if backend else [])
    assert [o.passed for o in report.outcomes] == [True, False, True]
    assert "WRONG SIDE" in report.markdown()


def test_a_crash_is_no_catch():
    def crash(backend):
        if backend:
            raise RuntimeError("no such luck")
        return []

    report = _controls(crash)
    assert not report.passed
    assert "RuntimeError: no such luck" in report.markdown()


def test_an_absent_level_is_named_and_does_not_count():
    def absent(backend):
        raise ModuleNotFoundError("No module named 'parity.training'")

    report = run_controls(
        {"training": absent, "layer": lambda backend: [Failure("y")] if backend else []},
        {"cross_term_dropped": planted.FAULTS["cross_term_dropped"]},
        lambda line: None,
    )
    assert report.passed
    assert report.absent == {"training": "No module named 'parity.training'"}
    assert "level training is absent" in report.markdown()


def test_an_unknown_fault_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="there are eps_misplaced"):
        main(["controls", "--fault", "gremlins", "--out", str(tmp_path)])


def test_every_fault_must_be_caught_somewhere():
    known = set(levels())
    for fault in (planted.FAULTS | planted.KERNEL_FAULTS).values():
        assert fault.caught_by
        assert set(fault.caught_by) <= known
