"""The numbers in README and in the pages are those of the committed results."""

import re

import pytest

from tools import figures, pages

PAGES = {path.relative_to(pages.ROOT).as_posix(): path.read_text() for path in pages.pages()}
SITE = [page for page in PAGES if page != "docs/attempts.md"]
FIELD = "<!-- value:"


# One page computes the memory of models.
SLOW = {"docs/measured/formats.md": [pytest.mark.slow]}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=SLOW.get(page, [])) for page, text in PAGES.items() if FIELD in text],
)
def test_numbers_are_those_of_the_results(page):
    assert PAGES[page] == pages.updated(PAGES[page]), "run `make figures`"


def test_a_changed_number_is_found():
    text = PAGES["README.md"]
    changed = text.replace("14,763<!--", "14,764<!--")
    assert changed != text
    assert pages.updated(changed) == text


def test_the_figure_of_readme_shows_the_results(tmp_path):
    def shown(path):
        return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())

    figures.write(tmp_path, [figures.layer])
    committed = pages.ROOT / "docs" / "figures" / "layer.svg"
    assert shown(tmp_path / "layer.svg") == shown(committed), "run `make figures`"


@pytest.mark.parametrize(
    "text", ["a <!-- value: nonsense -->1<!-- end -->", "<!-- results: 1 / 0 -->"]
)
def test_an_expression_that_fails_is_named(text):
    with pytest.raises(ValueError, match=r"(nonsense|1 / 0).* fails"):
        pages.updated(text)


def test_a_line_may_not_begin_with_a_comment():
    with pytest.raises(ValueError, match="begins with the comment"):
        pages.updated("a number is\n<!-- value: 1 + 1 -->2<!-- end --> here")


def test_a_column_that_no_row_has_is_named():
    table = """<!-- value: table([{"a": 1}], {"A": "{a}", "B": "{b}"}) --><!-- end -->"""
    with pytest.raises(ValueError, match=r"no row has the fields of the column 'B'"):
        pages.updated(table)


def test_guides_hold_no_measurements():
    measured = {page for page, text in PAGES.items() if FIELD in text}
    assert {page for page in measured if not page.startswith("docs/measured/")} == {"README.md"}


@pytest.mark.parametrize("page", SITE)
def test_pages_are_short(page):
    words = [word for word in pages.plain(PAGES[page]).split() if re.search(r"\w", word)]
    assert len(words) <= 2500
