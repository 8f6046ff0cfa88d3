"""Results as JSON Lines: a header that says what was measured on what, then one measurement a line.

A file is written line by line, so that a run that is stopped leaves what it had measured.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

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
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    if not lines or "environment" not in lines[0]:
        raise ValueError(
            f"{path} does not begin with a header; expected an object with environment"
        )
    return lines[0], lines[1:]


def line(row: Row) -> str:
    """Returns the row as one line of JSON."""
    text = json.dumps(finite(row), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text + "\n"


def finite(value: Any) -> Any:
    """Returns the value with null for what JSON has no number for: infinities and NaN."""
    match value:
        case dict():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
