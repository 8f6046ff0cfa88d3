"""Writes the numbers of README and of the pages from the committed results.

    python -m tools.pages

A number, or a whole table, stands behind a comment that says where it comes from:

    <!-- results: step = row("step", "h100", kind="DoRA", budget="12 GiB") -->
    DoRA takes <!-- value: step["over_lora"]:.3f -->0.961<!-- end --> of LoRA's time.

`results` are Python statements, and `value` is what an f-string has in its braces. Both know the
functions of `tools.tables` and the names from comments above them. This command writes the values
anew, and `tests/tools/test_pages.py` compares them with the files. mkdocs, which also calls this
module, leaves the comments out and draws the figures.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # mkdocs loads this file by its path

from tools import figures, tables

ROOT = Path(__file__).parents[1]
COMMENT = re.compile(
    r"<!-- results:(?P<statements>.*?)-->"
    r"|(?P<value><!-- value:(?P<field>.*?)-->).*?<!-- end -->",
    re.DOTALL,
)


def pages() -> list[Path]:
    """Returns README and all pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def updated(text: str) -> str:
    """Returns the text of a page with its values made anew from the results.

    Raises:
      ValueError: a comment's expression fails, or a line of a paragraph begins with a comment,
        which Markdown does not allow.
    """
    names: dict[str, Any] = {name: getattr(tables, name) for name in tables.__all__}

    def replacement(found: re.Match[str]) -> str:
        try:
            if found["statements"]:
                exec(found["statements"].strip(), names)
                return found[0]
            value = tables.filled(f"{{{found['field'].strip()}}}", names)
        except Exception as error:
            raise ValueError(f"{found[0]} fails: {error!r}") from error
        if "\n" in value:
            return f"{found['value']}\n\n{value}\n\n<!-- end -->"
        before = text[: found.start()].rpartition("\n")[2]
        if not re.search(r"\w|\|", before):
            raise ValueError(f"a line begins with the comment {found['value']}; move it back")
        return f"{found['value']}{value}<!-- end -->"

    return COMMENT.sub(replacement, text)


def plain(text: str) -> str:
    """Returns a page as it is shown, without comments."""
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def on_pre_build(config: Any) -> None:
    """Hook of mkdocs.yml: draws the figures."""
    figures.write(ROOT / "docs" / "figures")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Hook of mkdocs.yml."""
    return plain(markdown)


if __name__ == "__main__":
    for path in pages():
        path.write_text(updated(path.read_text()))
    figures.write(ROOT / "docs" / "figures", [figures.layer, *figures.FIGURES])
