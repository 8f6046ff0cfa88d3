"""README's measured section, the page of measurements and its figures are what the JSON says."""

import shutil
from pathlib import Path

import pytest

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
