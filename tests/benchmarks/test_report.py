import math
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.report import Report, correct
from benchmarks.results import Row

HEADER: Row = {
    "environment": {"card": "none", "device": "cuda"},
    "ceilings": {"copy": 4e12, "matmul": 8e14},
}
WRONG = {"check": {"passed": False, "of_bound": math.inf}}


def measured(variant: str, us: float, **fields) -> Row:
    row = {"group": "compose", "shape": {"rows": 4, "out": 8}, "framework": "jax", "bytes": 192}
    row |= {"variant": variant, "flops": 0, "check": {"passed": True, "of_bound": 0.5}}
    return row | {"device": {"median": us}, "wall": {"median": 2 * us}} | fields


def test_a_stopped_run_keeps_its_measurements(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ops.jsonl"
    ours = measured("ours", 1.0)
    writer = results.Writer(path, HEADER)
    for count, row in enumerate((ours, measured("plain", 2.0, **WRONG)), 1):
        writer.add(row)
        assert len(path.read_text().splitlines()) == 1 + count
    header, rows = Report.read(path)
    assert (header, rows[0]) == (HEADER, ours)
    # JSON has no infinity.
    assert rows[1]["check"]["of_bound"] is None
    assert [results.failed(row) for row in rows] == [False, True]


def test_a_file_without_a_header_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ops.jsonl"
    path.write_text(results.line({"group": "compose"}))
    with pytest.raises(ValueError, match="does not begin with a header"):
        results.read(path)


def test_ratios_are_over_the_fastest_candidate_by_each_clock() -> None:
    ours = measured("ours", 40.0)
    plain = measured("plain", 100.0, baseline="XLA")
    tuned = measured("plain, tuned", 80.0, baseline="XLA", wall={"median": 300.0})
    report = Report(HEADER, [plain, tuned, ours])
    assert report.ratio(ours) == pytest.approx(40 / 80)
    assert report.ratio(ours, "wall") == pytest.approx(80 / 200)
    assert report.ratio(plain) is None


@pytest.mark.parametrize("wrong", ["plain", "ours"])
def test_no_ratio_is_stated_while_a_check_is_red(wrong: str) -> None:
    ours, plain = (
        measured(name, 40.0, **fields, **(WRONG if wrong == name else {}))
        for name, fields in (("ours", {}), ("plain", {"baseline": "XLA"}))
    )
    # A correct candidate does not replace a wrong one.
    tuned = measured("plain, tuned", 80.0, baseline="XLA")
    assert Report(HEADER, [plain, tuned, ours]).ratio(ours) is None


def test_a_refusal_is_no_failure_and_an_error_is() -> None:
    refused, broken = measured("ours", 1.0, refused="no GPU"), measured("ours", 1.0, failed="Error")
    assert [results.failed(row) for row in (refused, broken)] == [False, True]
    assert results.describe(refused).endswith("refused: no GPU")
    assert results.describe(broken).endswith("failed: Error")
    del broken["check"], broken["failed"]
    assert not correct(broken)
