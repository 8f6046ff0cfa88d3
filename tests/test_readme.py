"""README: its snippets run, in order, and its measured section is what the JSON says."""

import re
import shutil
from pathlib import Path

import jax
import pytest

from tools import measured

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


def test_is_short():
    assert len(README.splitlines()) <= 130


def test_links_and_paths_exist():
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    for row in re.findall(r"^\| (`[^|]+/`) \|", README, re.MULTILINE):
        targets += re.findall(r"`([^`]+)`", row)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("parity", "test", "test-all", "test-gpu", "docs"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_measured_section_is_up_to_date():
    assert measured.main(["--check"]) == 0, "run `python tools/measured.py`"


def test_missing_marker_is_refused():
    with pytest.raises(ValueError, match="lacks a marker"):
        measured.updated("# Title", "body")


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
