"""The page of measurements and its figures are what the JSON says."""

import pytest

from tools import measured, quoted


@pytest.mark.slow
def test_every_figure_is_drawn_and_the_page_names_every_file(tmp_path):
    measured.write(tmp_path)
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.svg")}
    assert drawn == set(measured.FIGURES)
    assert "the paper: 2.00×" in (tmp_path / "figures/compose_speedups.svg").read_text()
    page = (tmp_path / "measured.md").read_text()
    assert all(f"`{name}`" in page for name in quoted.reports())
    assert "| norm | jax mosaic | 9 | 8192 in × 28672 out × 384 rank | 294.7 | 73%, worst" in page
    assert "| decode | 64 | 1 | zipf | 16 | DoRA | 1.166 | 0.305 | 1.466 | 0.995 |" in page
