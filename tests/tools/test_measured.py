"""README's measured section, the page of measurements and its figures are what the JSON says."""

import shutil
from pathlib import Path

import pytest

from benchmarks import results
from tools import measured

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_measured_section_is_up_to_date():
    assert measured.main(["--check"]) == 0, "run `python tools/measured.py`"


def test_missing_marker_is_refused():
    with pytest.raises(ValueError, match="lacks a marker"):
        measured.updated("# Title", "body")


@pytest.mark.slow
def test_every_figure_is_drawn_and_the_page_names_every_file(tmp_path):
    shutil.copytree(ROOT / measured.BENCHMARKS, tmp_path / measured.BENCHMARKS)
    (tmp_path / "docs").mkdir()
    measured.write(tmp_path)
    drawn = {path.stem for path in (tmp_path / "docs/figures").glob("*.svg")}
    assert drawn == set(measured.FIGURES)
    assert "the paper: 2.00×" in (tmp_path / "docs/figures/compose_speedups.svg").read_text()
    page = (tmp_path / "docs/measured.md").read_text()
    assert all(f"`{name}`" in page for name in measured.reports(ROOT))
    assert "| norm | jax mosaic | 9 | 8192 in × 28672 out × 384 rank | 294.7 | 73%, worst" in page


@pytest.mark.slow
def test_many_adapters_are_told_and_drawn(tmp_path):
    """From files as the levels write them."""
    shutil.copytree(ROOT / measured.BENCHMARKS, tmp_path / measured.BENCHMARKS)
    environment = {"card": "a card", "jax": "1", "torch": "2", "commit": "abc"}
    batch = {"task": "decode", "rows": 8, "tokens": 1, "distinct": 5, "bound": 1.05}
    times = {
        "base": 1.0,
        "LoRA": 1.2,
        "DoRA": 1.26,
        "DoRA xla": 2.0,
        "kernel": 1.25,
        "one-hot": 3.15,
    }
    bank = [{"task": "load", "rank": 8, "layers": 2, "ms": 7.04}]
    bank += [batch | {"mix": "zipf", "kind": kind, "ms": ms} for kind, ms in times.items()]
    bank.append(batch | {"mix": "zipf", "kind": "loop", "failed": "no room"})
    bank += [
        batch | {"mix": "growth", name: number, "kind": kind, "ms": 1.0, "over_base": number}
        for name in ("adapters", "rank")
        for number in (1, 2)
        for kind in ("base", "LoRA", "DoRA")
    ]
    answers = {"answers": 9, "tokens_per_s": 1234.0, "first_token_ms": 5.4, "of_base": 0.91}
    answers["first_token_p90_ms"] = 7.0
    serve = [answers | {"kind": kind, "adapters": n} for kind, n in (("base", 0), ("DoRA", 4))]
    for name, rows in (("bank", bank), ("serve", serve)):
        path = tmp_path / "benchmarks/results/card" / f"{name}.jsonl"
        writer = results.Writer(path, {"kind": "measurements", "environment": environment})
        for row in rows:
            writer.add(row)
    (tmp_path / "docs").mkdir()
    measured.write(tmp_path)
    page = (tmp_path / "docs/measured.md").read_text()
    assert "| decode 8 × 1 | zipf | 5 | 1.05 | 1.260 | 1.26 | 1.05 | 2.50 |  | kernel |" in page
    assert "| 8 | 2 | 7.0 |" in page
    assert "| DoRA | 4 | 1,234 | 5 | 7 | 0.91 |" in page
    for name in ("bank_growth", "served"):
        assert f"figures/{name}.svg" in page
        assert "DoRA" in (tmp_path / f"docs/figures/{name}.svg").read_text()
