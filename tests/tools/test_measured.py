"""The page of measurements and its figures are what the JSON says."""

import re

import pytest

from tools import figures, measured, quoted


@pytest.mark.slow
def test_every_figure_is_drawn_and_the_page_names_every_file(tmp_path):
    measured.write(tmp_path)
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.svg")}
    assert drawn == {make.__name__ for make in figures.FIGURES}
    page = (tmp_path / "measured.md").read_text()
    assert all(f"`{name}`" in page for name in quoted.reports())
    assert re.search(r"\| norm 8192×28672 r384 +\| jax mosaic +\| 294.7 +\| 0.57 +\| 75%", page)
    assert "| decode | 64 | 1 | zipf | 16 | DoRA | 1.166 | 0.284 | 1.382 | 1.014 |" in page
