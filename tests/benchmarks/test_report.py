import dataclasses
import math
import re
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.check import Check
from benchmarks.clock import Spread
from benchmarks.report import Ceilings, Measurement, Report

GOOD = Check(True, True, 0.5, 1e-3, "y")
WRONG = Check(False, True, math.inf, 1e-3, "y")
H200 = {"card": "none", "device": "cuda"}


def measured(variant: str, us: float, check: Check = GOOD, **fields) -> Measurement:
    known = {
        "group": "compose",
        "shape": {"rows": 4, "out": 8},
        "framework": "jax",
        "bytes": 192,
        "flops": 0,
        "device": Spread(us, us, us, 9),
        "wall": Spread(2 * us, us, 3 * us, 5),
        "check": check,
    }
    return Measurement(variant=variant, **(known | fields))


CEILINGS = Ceilings(copy=4e12, matmul=8e14)


def report_of(*measurements: Measurement) -> Report:
    return Report(H200, CEILINGS, list(measurements))


def test_a_file_keeps_what_was_measured_before_a_run_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ops.jsonl"
    ours = measured("ours", 1.0)
    writer = results.Writer(path, {"environment": H200, "ceilings": dataclasses.asdict(CEILINGS)})
    for count, m in enumerate((ours, measured("plain", 2.0, WRONG)), 1):
        writer.add(m.row())
        assert len(path.read_text().splitlines()) == 1 + count
    _, rows = results.read(path)
    # JSON has no infinity.
    assert rows[1]["check"]["of_bound"] is None
    assert [results.failed(row) for row in rows] == [False, True]
    again = Report.read(path)
    assert (again.measurements[0], again.ceilings) == (ours, CEILINGS)


def test_a_file_without_a_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ops.jsonl"
    path.write_text(results.line({"group": "compose"}))
    with pytest.raises(ValueError, match="does not begin with a header"):
        results.read(path)


def test_ratios_are_over_the_fastest_candidate_by_each_clock() -> None:
    ours = measured("ours", 40.0)
    report = report_of(
        measured("plain", 100.0, baseline="XLA"),
        measured("plain, tuned", 80.0, baseline="XLA", wall=Spread(300.0, 1.0, 1.0, 5)),
        ours,
    )
    assert report.ratio(ours, "device") == pytest.approx(40 / 80)
    assert report.ratio(ours, "wall") == pytest.approx(80 / 200)
    assert report.ratio(report.measurements[0], "device") is None


@pytest.mark.parametrize("wrong", ["plain", "ours"])
def test_no_ratio_is_stated_while_a_check_is_red(wrong: str) -> None:
    ours = measured("ours", 40.0, WRONG if wrong == "ours" else GOOD)
    plain = measured("plain", 100.0, WRONG if wrong == "plain" else GOOD, baseline="XLA")
    report = report_of(plain, ours)
    assert report.ratio(ours, "device") is None


def test_what_was_refused_is_no_failure_and_what_failed_is() -> None:
    refused = Measurement("compose", {"rows": 4}, "jax", "ours", 1, 0, refused="no GPU")
    assert not results.failed(refused.row())
    assert results.failed(measured("ours", 1.0, failed="RuntimeError").row())


def test_tables_show_no_time_of_what_is_wrong() -> None:
    report = report_of(
        measured("plain", 64.0, baseline="jax plain"),
        measured("ours", 32.0, bytes=4_000_000),
        measured("broken", 11.125, WRONG),
    )
    text = report.text()
    assert [word in text for word in ("32.0", "0.50", "3%")] == [True] * 3
    assert re.search(r"compose 4×8 \| jax broken +\| RED", text)
    assert "11.1" not in text
