import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import tune, tuning
from benchmarks.boxes import Point, best
from benchmarks.check import Check
from benchmarks.clock import Spread
from benchmarks.ops import dropout
from benchmarks.report import Measurement, Report
from jax_dora.ops import tuning as tables

SHIPPED = tune.ROOT / "jax_dora" / "ops" / "tuning_data" / "nvidia_h200.json"
GOOD = Check(True, True, 0.5, 1e-3, "norm")
WRONG = Check(False, True, 2.0, 1e-1, "norm")


def norm_at(
    n_in: int, rank: int, us: float, variant: str = "mosaic", check: Check = GOOD, **config: int
) -> Measurement:
    return Measurement(
        "norm",
        {"in": n_in, "out": 4096, "rank": rank},
        "jax",
        variant,
        bytes=1,
        flops=1,
        config=config,
        device=Spread(us, us, us, 9),
        check=check,
    )


def report_of(*measurements: Measurement) -> dict[str, Any]:
    environment = {"commit": "abc", "device": "cuda", "card": "NVIDIA H200"}
    return Report(
        "ops", environment, False, False, measurements=list(measurements), complete=True
    ).as_dict()


def norms(*times: tuple[int, float, float]) -> dict[str, Any]:
    """A report of (in, the kernel's time, XLA's)."""
    pairs = ((norm_at(n, 64, own), norm_at(n, 64, xla, "factored")) for n, own, xla in times)
    return report_of(*(m for pair in pairs for m in pair))


def test_the_shipped_table_is_what_its_reports_say(tmp_path: Path) -> None:
    shipped = json.loads(SHIPPED.read_text())
    reports = [str(tune.ROOT / source["file"]) for source in shipped["source"]]
    arguments = [word for report in reports for word in ("--ops", report)]
    assert command.main(["tune", "--out", str(tmp_path), *arguments]) == 0
    assert json.loads((tmp_path / SHIPPED.name).read_text()) == shipped


def test_the_shipped_bounds_leave_out_every_measured_loss() -> None:
    table = tables.read(SHIPPED)
    losses = 0
    for source in json.loads(SHIPPED.read_text())["source"]:
        works: dict[str, dict[str, dict]] = {}
        for m in json.loads((tune.ROOT / source["file"]).read_text())["measurements"]:
            if m["framework"] == "jax" and m["device"]:
                works.setdefault(f"{m['group']} {m['shape']}", {})[m["variant"]] = m
        for variants in works.values():
            if not {"xla", "mosaic"} <= variants.keys():
                continue
            group = variants["xla"]["group"]
            (kernel,) = (k for k, c in tuning.CONTESTS.items() if group in c.groups)
            own, xla = (variants[name]["device"]["median"] for name in ("mosaic", "xla"))
            shape = variants["xla"]["shape"]
            elements = shape["rows"] * shape.get("out", 1)
            sizes = {"elements": elements, "lane": 256, "itemsize": 2, "in": 8192} | shape
            if own > 1.02 * xla:
                losses += 1
                bounds = table.crossovers[kernel]
                assert bounds is None or not bounds.hold(sizes), (kernel, shape)
    assert losses > 10


def test_bounds_exclude_a_losing_shape_and_keep_the_most_saved() -> None:
    report = norms((1024, 5, 4), (2048, 10, 20), (4096, 30, 60), (8192, 90, 80), (16384, 190, 191))
    # To the middle of what is measured on either side, and never past it where nothing is.
    assert tuning.crossovers(report)["norm"] == {
        "min": {"in": 1449, "out": 4096},
        "max": {"in": 5792, "rank": 64},
    }


def test_a_kernel_that_never_wins_has_no_bounds() -> None:
    found = tuning.crossovers(norms((1024, 5, 4), (2048, 10, 10)))
    assert found == dict.fromkeys(tuning.CONTESTS)


@pytest.mark.parametrize(("us", "kept"), [(81.5, True), (81.7, False)])
def test_what_is_slower_by_less_than_the_slack_may_stay(us: float, kept: bool) -> None:
    bounds = best_norm((4096, 30, 60), (8192, us, 80), (16384, 100, 160))
    assert (bounds["min"]["in"] == 4096) == kept


def best_norm(*times: tuple[int, float, float]) -> dict[str, dict[str, int]]:
    bounds = tuning.crossovers(norms(*times))["norm"]
    assert bounds is not None
    return bounds


def test_a_wrong_result_never_wins() -> None:
    def report(check: Check) -> dict[str, Any]:
        return report_of(
            norm_at(1024, 64, 10, check=check),
            norm_at(1024, 64, 20, "factored"),
            norm_at(2048, 64, 20),
            norm_at(2048, 64, 40, "factored"),
        )

    for check, least in ((GOOD, 1024), (WRONG, 1449)):
        bounds = tuning.crossovers(report(check))["norm"]
        assert bounds is not None
        assert bounds["min"]["in"] == least


def test_the_fastest_of_xla_s_variants_is_the_rival() -> None:
    kept = norm_at(4096, 64, 25, "factored, ‖W‖² kept")
    rivals = (norm_at(4096, 64, 60, "factored"), kept)
    assert tuning.crossovers(report_of(norm_at(4096, 64, 30), *rivals))["norm"] is None


def test_the_dtype_is_that_of_the_measured_bytes() -> None:
    def backward(itemsize: int) -> dict[str, Any]:
        spread = {"xla": Spread(9, 9, 9, 9), "mosaic": Spread(6, 6, 6, 9)}
        return report_of(
            *(
                Measurement(
                    "backward, d_base",
                    {"rows": 1024, "out": 1536},
                    "jax",
                    name,
                    bytes=3 * 1024 * 1536 * itemsize,
                    flops=0,
                    device=times,
                    check=GOOD,
                )
                for name, times in spread.items()
            )
        )

    for itemsize in (2, 4):
        assert tuning.crossovers(backward(itemsize))["compose_backward"] == {
            "min": {"rows": 1024, "out": 1536, "lane": 256},
            "max": {"itemsize": itemsize},
        }


def test_a_tie_on_a_product_of_sizes_bounds_its_factors() -> None:
    def point(rows: int, out: int, saved: float) -> Point:
        return Point({"rows": rows, "out": out, "elements": rows * out}, saved, saved < 0)

    bounds = best([point(64, 64, 3.0), point(128, 64, 3.0), point(256, 64, -1.0)])
    assert bounds is not None
    assert (bounds.min, bounds.max) == ({"rows": 64, "out": 64}, {"rows": 181})


def test_configs_that_beat_the_kernel_s_own_choice_become_entries() -> None:
    report = report_of(
        *(norm_at(4096, rank, 30) for rank in (64, 128, 256)),
        norm_at(4096, 64, 20, "mosaic stages=2", stages=2),
        norm_at(4096, 128, 40, "mosaic stages=2", stages=2),
        norm_at(4096, 256, 29.7, "mosaic stages=2", stages=2),
        norm_at(4096, 64, 25, "mosaic stages=3", stages=3),
        norm_at(4096, 128, 26, "mosaic stages=3", stages=3),
        norm_at(4096, 256, 1, "mosaic stages=3", WRONG, stages=3),
    )
    entries = tuning.configs(report)["norm"]
    assert [entry["config"] for entry in entries] == [{"stages": 2}, {"stages": 3}]
    assert [entry["max"] for entry in entries] == [{"rank": 90}, {"rank": 181}]
    # What is told apart by 1 % is not told apart.
    assert tuning.configs(report_of(norm_at(1, 1, 100), norm_at(1, 1, 99, "m", stages=2))) == {}


def test_a_quick_run_measures_every_kernel_and_writes_a_table(tmp_path: Path) -> None:
    arguments = ["--quick", "--device", "cpu", "--commit", "abc", "--only", "*jax mosaic"]
    assert command.main(["tune", "--out", str(tmp_path), *arguments]) == 0
    report = json.loads((tmp_path / "tune.json").read_text())
    assert [m["failed"] for m in report["measurements"] if not m["check"]["passed"]] == []
    tried = {m["group"] for m in report["measurements"] if m["config"]}
    assert tried == {group for contest in tuning.CONTESTS.values() for group in contest.groups} - {
        "norm, fp32 adapters",
        "expand+compose+inner",
    }
    table = tables.read(tmp_path / "cpu.json")
    assert table.crossovers == dict.fromkeys(tables.KERNELS)
    assert json.loads((tmp_path / "cpu.json").read_text())["source"][0]["commit"] == "abc"


def test_every_candidate_is_measured_once_at_every_shape() -> None:
    works = list(tune.works("cuda", quick=False))
    shapes = len(tune.NORM_SHAPES) * 4 + len(tune.EXPAND_SHAPES) * 4
    shapes += 2 * (len(tune.PROJECTION_SHAPES) + len(dropout.SHAPES))
    assert len(works) == shapes + 5 * len(tune.ROWWISE_SHAPES)


@pytest.mark.parametrize("field", ["quick", "wall_only"])
def test_no_table_is_made_of_a_trial_run(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ops.json"
    path.write_text(json.dumps(norms((1024, 5, 9)) | {field: True}))
    with pytest.raises(SystemExit):
        command.main(["tune", "--ops", str(path), "--out", str(tmp_path)])
    assert "quick, CPU or unfinished" in capsys.readouterr().err


def test_changes_are_named() -> None:
    before = tuning.table({"a": norms((1024, 5, 9))})
    after = tuning.table({"a": norms((2048, 5, 9))})
    (line,) = tuning.changes(before, after)
    assert line.startswith('crossovers: norm: {"min": {"in": 1024')
    assert tuning.changes(after, after) == ["nothing changes"]
