import dataclasses
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import figures, table
from benchmarks.check import Check
from benchmarks.clock import Spread
from benchmarks.report import Ceilings, Measurement, Report

GOOD = Check(True, True, 0.5, 1e-3, "y")
WRONG = Check(False, True, math.inf, 1e-3, "y")


def measured(variant: str, us: float, check: Check = GOOD, **fields) -> Measurement:
    spread = Spread(us, us, us, 9)
    known = {
        "group": "compose",
        "shape": {"rows": 4, "out": 8},
        "framework": "jax",
        "bytes": 192,
        "flops": 0,
        "device": spread,
        "wall": Spread(2 * us, us, 3 * us, 5),
        "check": check,
    }
    return Measurement(variant=variant, **(known | fields))


def report_of(*measurements: Measurement) -> Report:
    return Report(
        "ops",
        {"card": "none"},
        wall_only=False,
        quick=False,
        ceilings=Ceilings(copy=4e12, matmul=8e14),
        measurements=list(measurements),
        complete=True,
    )


def test_speedups_are_over_the_fastest_candidate_by_each_clock() -> None:
    report = report_of(
        measured("plain", 100.0, baseline="XLA"),
        measured("plain, tuned", 80.0, baseline="XLA", wall=Spread(300.0, 1.0, 1.0, 5)),
        measured("ours", 40.0),
    )
    (entry,) = report.speedups()
    assert (entry["variant"], entry["over"]) == ("ours", "XLA")
    assert entry["device"] == pytest.approx(2.0)
    assert entry["wall"] == pytest.approx(200.0 / 80.0)


@pytest.mark.parametrize("wrong", ["plain", "ours"])
def test_no_speedup_is_stated_while_a_check_is_red(wrong: str) -> None:
    report = report_of(
        measured("plain", 100.0, WRONG if wrong == "plain" else GOOD, baseline="XLA"),
        measured("ours", 40.0, WRONG if wrong == "ours" else GOOD),
        measured("other", 50.0),
    )
    entries = {e["variant"]: e for e in report.speedups()}
    assert entries["ours"]["withheld"]
    assert not {"device", "wall"} & set(entries["ours"])
    assert entries["other"]["withheld"] == (wrong == "plain")
    assert not report.passed


def test_what_was_refused_is_no_failure_and_has_no_speedup() -> None:
    report = report_of(
        measured("plain", 100.0, baseline="XLA"),
        Measurement("compose", {"rows": 4, "out": 8}, "jax", "ours", 1, 0, refused="no GPU"),
    )
    assert report.passed
    assert report.speedups() == []


def test_a_failed_or_unfinished_run_does_not_pass() -> None:
    assert not report_of(measured("ours", 1.0, failed="RuntimeError")).passed
    assert not dataclasses.replace(report_of(measured("ours", 1.0)), complete=False).passed


def test_json_holds_rates_and_shares_of_the_floor(tmp_path: Path) -> None:
    report = report_of(measured("ours", 10.0, WRONG, bytes=20_000_000, flops=4_000_000_000))
    written = json.loads(report.write(tmp_path).read_text())
    (entry,) = written["measurements"]
    assert entry["bytes_per_second"] == pytest.approx(2e12)
    # 5 µs for the bytes, 5 µs for the products.
    assert entry["floor_us"] == pytest.approx(5.0)
    assert entry["share_of_floor"] == pytest.approx(0.5)
    assert entry["check"]["of_bound"] is None
    assert written["passed"] is False


def test_a_measurement_survives_json() -> None:
    measurement = measured("ours", 1.0)
    through = json.loads(json.dumps(dataclasses.asdict(measurement)))
    assert Measurement.from_dict(through) == measurement


def test_tables_and_figures_show_no_time_of_what_is_wrong(tmp_path: Path) -> None:
    works = [
        measured(
            variant,
            us * rank,
            WRONG if variant == "broken" else GOOD,
            group="norm",
            shape={"in": 16, "out": 8, "rank": rank},
            baseline="jax plain" if variant == "plain" else "",
            temp_bytes=rank,
        )
        for rank in (1, 2, 4)
        for variant, us in (("plain", 64.0), ("ours", 32.0), ("broken", 11.125))
    ]
    works += [measured("plain", 3.0, baseline="jax plain"), measured("ours", 2.0)]
    report = report_of(*works)
    table.show(report, tmp_path, Console(quiet=True))
    text = (tmp_path / "ops.txt").read_text()
    assert "0.50×" in text
    assert "RED norm 16×8 r1 jax broken" in text
    assert "11.1" not in text
    drawn = {path.name for path in figures.draw(report, tmp_path)}
    assert drawn == {
        "ops-norm-speedup.png",
        "ops-norm-rank.png",
        "ops-compose-speedup.png",
        "ops-compose-bandwidth.png",
    }
    assert all((tmp_path / name).stat().st_size > 1000 for name in drawn)
