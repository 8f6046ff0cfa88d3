"""README: its snippets run, in order, and its measured section is what the JSON says."""

import json
import re
from pathlib import Path

import jax
import pytest

from tools import readme_tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert snippets
    namespace: dict[str, object] = {}
    # As a user's process has it.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, snippet in enumerate(snippets, 1):
            exec(compile(snippet, f"README.md, snippet {number}", "exec"), namespace)


def test_links_and_paths_exist():
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    targets += re.findall(r"^\| `([^`]+/)` \|", README, re.MULTILINE)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("parity", "test", "test-gpu", "test-oldest", "lint", "types", "format"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_measured_section_is_up_to_date():
    assert readme_tables.main(["--check"]) == 0, "run `python tools/readme_tables.py`"


def report(folder: Path, content: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(content))


ENVIRONMENT = {"card": "A card", "commit": "abc", "jax": "1", "torch": "2", "triton": "3"}


def test_agreement_table(tmp_path):
    side = {"error": 1e-6}
    good = {
        "level": "operator",
        "dtype": "float32",
        "quantity": "y",
        "jax": side,
        "torch": side,
        "difference": 2e-6,
        "passed": True,
        "worst": 0.25,
    }
    wrong = {**good, "quantity": "norm", "passed": False, "worst": None}
    report(tmp_path / "parity/reports/cuda", {"environment": ENVIRONMENT, "rows": [good, wrong]})
    table = readme_tables.section(tmp_path)
    assert "A card, jax 1, torch 2, triton 3, commit abc" in table
    assert "| operator | float32 | 1 of 2 | norm | 1e-06 | 1e-06 | 2e-06 | ∞ |" in table


def test_speed_table_withholds_what_is_red(tmp_path):
    measured = {
        "group": "compose",
        "framework": "jax",
        "variant": "mosaic",
        "shape": {"rows": 4096, "out": 8192},
        "bytes": 2**28,
        "refused": "",
        "failed": "",
        "device": {"median": 50.0},
        "bytes_per_second": 4.0e12,
        "share_of_floor": 0.95,
        "check": {"passed": True},
    }
    others = [
        {**measured, "shape": {"rows": 1, "out": 512}, "share_of_floor": 0.01},
        {**measured, "variant": "xla", "check": {"passed": False}},
        {**measured, "framework": "torch", "refused": "no GPU"},
    ]
    content = {
        "level": "ops",
        "environment": ENVIRONMENT,
        "ceilings": {"copy": 4.2e12, "matmul": 8e14},
        "measurements": [measured, *others],
    }
    report(tmp_path / "benchmarks/results/h200", content)
    table = readme_tables.section(tmp_path)
    assert (
        "| compose | jax mosaic | 1 | 4096 rows × 8192 out | 50.0 | 4.00 | 95%, worst 95% |"
        in table
    )
    assert "| compose | jax xla | 1 | withheld: its check is red |" in table
    assert "| torch" not in table
    assert "4.20 TB/s" in table


def test_headline_has_a_row_for_a_work_and_the_range_of_its_runs(tmp_path):
    def over_lora(variant, device):
        over = "the best jax LoRA"
        times = {"device": device, "wall": device and 2 * device}
        return {"variant": variant, "over": over, "work": "model, r384", **times}

    folder = tmp_path / "benchmarks/results/h200"
    folder.mkdir(parents=True)
    for name, speedups in {
        "one": [over_lora("DoRA (no Triton)", 0.8), over_lora("DoRA, norm kept (no Triton)", 1.0)],
        "two": [over_lora("DoRA (no Triton)", 0.5), over_lora("DoRA (no Triton)", None)],
    }.items():
        content = {"environment": ENVIRONMENT, "measurements": [], "speedups": speedups}
        (folder / f"{name}.json").write_text(json.dumps(content))
    links = (f"[`{n}.json`](benchmarks/results/h200/{n}.json)" for n in ("one", "two"))
    table = readme_tables.headline(tmp_path)
    ratios = "1.25× to 2.00×, wall 0.62× to 1.00× | 1.00×, wall 0.50×"
    assert f"| model, r384 | {ratios} | {', '.join(links)} |" in table
    assert table.count("model, r384") == 1


def test_missing_marker_is_refused():
    with pytest.raises(ValueError, match="lacks a marker"):
        readme_tables.updated("# Title", "body")
