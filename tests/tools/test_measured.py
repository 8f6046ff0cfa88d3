"""The page of measurements and the figures are made from the committed results."""

import re

import pytest

from benchmarks.results import row
from tools import figures, measured
from tools.performance_tables import reports


@pytest.mark.slow
def test_every_figure_is_drawn_and_the_page_names_every_file(tmp_path):
    measured.write(tmp_path)
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.svg")}
    assert drawn == {make.__name__ for make in figures.FIGURES}
    page = (tmp_path / "measured.md").read_text()
    assert all(f"`{name}`" in page for name in reports())
    assert re.search(r"\| norm 8192×28672 r384 +\| jax mosaic +\| 246.1 +\| 0.48 +\| 89%", page)
    line = row("bank", "h100", task="decode", rows=64, mix="zipf", kind="DoRA")
    assert (
        f"| DoRA | {line['bytes_over_base']:.3f} | {line['ms']:.3f} | {line['over_base']:.3f} |"
        in page
    )
