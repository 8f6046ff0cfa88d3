"""`python -m parity`: exit codes, reports, filters."""

import json

import pytest

from parity import cases
from parity.__main__ import main


def test_norms_pass_and_are_reported(tmp_path, capsys):
    options = ["--quick", "--case", "^norm 192", "--commit", "abc", "--out", str(tmp_path)]
    assert main(["--device", "cpu", *options]) == 0
    report = json.loads((tmp_path / "parity.json").read_text())
    assert report["passed"]
    assert report["environment"]["commit"] == "abc"
    assert {"card", "jax", "torch", "triton", "kernels"} <= set(report["environment"])
    assert {row["dtype"] for row in report["rows"]} == {"bfloat16", "float16", "float32"}
    for row in report["rows"]:
        assert row["passed"]
        for side in ("jax", "torch"):
            assert row[side]["error"] <= row[side]["tolerance"]
    markdown = (tmp_path / "parity.md").read_text()
    assert "Every check passed." in markdown
    assert "norm 192x128 r16 float32 cancellation" in markdown
    assert "comparisons passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "case", ["compose 5x43 bfloat16", "compose 7x72 float16 near unity", "5x27x43 r3 float32"]
)
def test_cases_pass(case, tmp_path):
    assert main(["--device", "cpu", "--case", f"{case}$", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "parity.json").read_text())["rows"]
    pairs = {(row["jax"]["implementation"], row["torch"]["implementation"]) for row in rows}
    # Mosaic takes no width that is not a multiple of 8.
    assert pairs == {("xla", "eager"), ("xla" if "43" in case else "mosaic", "triton")}


def test_list_names_every_case(capsys):
    assert main(["--device", "cpu", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == len(set(names))
    assert "encoder all-MiniLM-L6-v2" in names
    for word in ("cancellation", "zero rows", "near unity", "rslora", "frozen magnitude", "r768"):
        assert any(word in name for name in names), word


def test_a_filter_that_matches_nothing_is_an_error():
    with pytest.raises(SystemExit, match="no case matches --case 'unheard of'"):
        main(["--device", "cpu", "--case", "unheard of"])


def test_a_broken_expression_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--case", "("])
    assert "--case is '(', no regular expression" in capsys.readouterr().err


def test_a_gpu_runs_every_paper_shape():
    names = [case.name for case in cases.gpu_cases()]
    assert len(names) == len(set(names))
    for rows, out in cases.PAPER_ACTIVATIONS:
        assert f"compose {rows}x{out} bfloat16" in names


@pytest.mark.gpu
def test_kernels_pass_natively(tmp_path):
    levels = ["--level", "operator", "--level", "layer"]
    assert main(["--device", "cuda", "--quick", *levels, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "parity.json").read_text())
    assert report["environment"]["kernels"] == "native"
