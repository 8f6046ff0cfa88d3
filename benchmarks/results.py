"""Results as JSON Lines: a header that says what was measured on what, then one measurement a line.

A file is written line by line, so that a run that is stopped leaves what it had measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parity.report import finite

Row = dict[str, Any]


class Writer:
    """Writes one file of results; each row is in the file when `add` returns."""

    def __init__(self, path: Path, header: Row) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        path.write_text(line(header))

    def add(self, row: Row) -> None:
        with self.path.open("a") as file:
            file.write(line(row))


def read(path: Path) -> tuple[Row, list[Row]]:
    """Returns the header and the rows of a file.

    Raises:
      ValueError: the file is empty, or its first line is no header.
    """
    header, *rows = [json.loads(text) for text in path.read_text().splitlines()] or [{}]
    if "environment" not in header:
        raise ValueError(
            f"{path} does not begin with a header; expected an object with environment"
        )
    return header, rows


def line(row: Row) -> str:
    """Returns the row as one line of JSON, with null for infinities and NaN."""
    text = json.dumps(finite(row), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text + "\n"
