"""Every figure is drawn from committed JSON, and one without its JSON names the command."""

import json
import shutil
from pathlib import Path

import pytest

from parity import tolerances
from tools import figures, readme_tables

ROOT = Path(__file__).parents[2]


def pair(kind, one, other, seed, passed, **changes):
    figures = {"mean": 1e-4, "worst": 1e-3, "final": 1e-5, "gradient_norm_median": 1e-3}
    figures |= {"relative_drift": 0.01}
    return {"kind": kind, "one": one, "other": other, "seed": seed, "passed": passed} | (
        figures | changes
    )


TRAINING = {
    "level": "training",
    "environment": {"card": "A card", "commit": "abc", "jax": "1", "torch": "2", "triton": "3"},
    "settings": {
        "steps": 20,
        "rows": 2,
        "length": 8,
        "rank": 4,
        "layers": 1,
        "hidden": 64,
        "dtype": "bfloat16",
    },
    "limits": {"mean": 7.1e-4, "worst": 1.1e-2, "final": 1.5e-4},
    "failures": [],
    "curve_every": 10,
    "pairs": [
        pair("across frameworks", "jax mosaic", "torch triton", 1, True),
        pair("across frameworks", "jax mosaic", "torch triton", 2, False, mean=2e-3),
        pair("rounding floor", "jax xla", "jax xla, one ulp off", 1, None, worst=None),
    ],
    "curves": {"1": {"jax mosaic": {"loss": [3.0, None], "gradient_norm": [1.0, 1.0]}}},
}
CONTROLS = {
    "environment": TRAINING["environment"],
    "outcomes": [
        {
            "level": level,
            "fault": fault,
            "backend": backend,
            "expected": expected,
            "caught": caught,
            "passed": passed,
            "error": "",
        }
        for level, fault, backend, expected, caught, passed in (
            ("layer", "none", None, False, False, True),
            ("layer", "norm_attached", "jax", True, True, True),
            ("training", "norm_attached", "jax", True, False, False),
            ("training", "eps_misplaced", "torch", False, False, True),
        )
    ],
}
MODEL = {
    "environment": TRAINING["environment"],
    "runs": [
        {
            "name": "wide bf16",
            "errors": {"PEFT": "out of memory"},
            "pairs": [
                {
                    "first": "Flax",
                    "second": second,
                    "logits": {
                        "distance": {"cosine": 2e-5, "relative": 6e-3},
                        "top1": 0.987,
                        "kl_mean": 3e-5,
                    },
                    "adapter": adapter,
                }
                for second, adapter in (("torch", {"relative": 1e-2}), ("fp64 base", None))
            ],
            "checks": [
                {
                    "systems": systems,
                    "quantity": "logits, 1 - cosine",
                    "value": value,
                    "allowed": 1e-4,
                    "note": "goal met",
                    "passed": value <= 1e-4,
                }
                for systems, value in (("Flax, torch", 2e-5), ("Flax, PEFT", 3e-5))
            ],
        }
    ],
}


def write(root, name, content):
    folder = root / "parity/reports/cuda"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_every_figure_is_drawn(tmp_path):
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    write(tmp_path, "training", TRAINING)
    assert figures.main(["--root", str(tmp_path)]) == 0
    for wanted in figures.FIGURES:
        text = (tmp_path / "docs/figures" / f"{wanted.name}.svg").read_text()
        assert text.startswith("<?xml")
    again = tmp_path / "again"
    assert figures.main(["--root", str(tmp_path), "--out", str(again)]) == 0
    for file in again.iterdir():
        assert file.read_bytes() == (tmp_path / "docs/figures" / file.name).read_bytes()


def test_the_papers_numbers_are_in_the_figures(tmp_path):
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    figures.main(["--root", str(tmp_path), "--allow-missing"])
    speed = (tmp_path / "docs/figures/compose_speedups.svg").read_text()
    assert "the paper: 2.00×" in speed
    assert "the paper: 1.08×" in speed


def test_missing_measurements_name_their_command(tmp_path, capsys):
    assert figures.main(["--root", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "convergence: no parity/reports/cuda/training.json" in told
    assert "`python -m parity training --device cuda`" in told
    assert "compose_speedups: no benchmarks/results/h200/ops.json" in told
    assert figures.main(["--root", str(tmp_path), "--allow-missing"]) == 0
    assert [file.name for file in (tmp_path / "docs/figures").iterdir()] == ["stability.svg"]


def test_what_is_not_correct_is_not_drawn():
    report = json.loads((ROOT / "benchmarks/results/h200/ops.json").read_text())
    for measurement in report["measurements"]:
        measurement["check"] = {"passed": False}
    assert not figures._correct({"ops.json": report})


def test_fidelity_says_what_was_not_measured(tmp_path):
    text = readme_tables.fidelity(tmp_path)
    for level in ("model", "training", "controls"):
        assert f"Not measured yet: `python -m parity {level}" in text


def test_fidelity_tables(tmp_path):
    write(tmp_path, "training", TRAINING)
    write(tmp_path, "model", MODEL)
    write(tmp_path, "controls", CONTROLS)
    text = readme_tables.fidelity(tmp_path)
    assert (
        "| across frameworks | jax mosaic – torch triton | 1, 2 | 2.0e-03 | 1.0e-03 | 1.0e-05 |"
        in text
    )
    assert "1 of 2" in text
    assert "| ∞ |" in text
    assert "not judged" in text
    assert "wide bf16:" in text
    assert "| Flax – torch | 2.0e-05 | 6.0e-03 | 98.70% | 3.0e-05 | 1.0e-02 |" in text
    assert "| Flax – fp64 base | 2.0e-05 | 6.0e-03 | 98.70% | 3.0e-05 |  |" in text
    assert "| logits, 1 - cosine | 2 of 2 | Flax, PEFT | 3.0e-05 | 1.0e-04 | goal met |" in text
    assert "| PEFT | failed | out of memory |" in text
    assert "| none |  | passes | not run |" in text
    assert "| norm_attached | jax | **caught** | MISSED |" in text
    assert "| eps_misplaced | torch | not run | – |" in text
    assert "A card, jax 1, torch 2, triton 3, commit abc" in text


@pytest.mark.parametrize(
    "value",
    [
        tolerances.TRAINING_MEAN_LOSS_DIFFERENCE,
        tolerances.TRAINING_WORST_LOSS_DIFFERENCE,
        tolerances.TRAINING_FINAL_EVAL_DIFFERENCE,
        tolerances.OPERATOR_FP32_MAX_ABS,
        tolerances.D_MAGNITUDE_FP32_MAX_ABS,
    ],
)
def test_the_page_states_the_tolerances(value):
    mantissa, exponent = f"{value:e}".split("e")
    written = f"{float(mantissa):g}e{int(exponent)}"
    assert written in (ROOT / "docs/fidelity.md").read_text()
