"""Results as JSON Lines: a header that says what was measured on what, then one measurement a line.

A file is written line by line, so that a run that is stopped leaves what it had measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parity.report import Writer as Writer
from parity.report import line as line

Row = dict[str, Any]


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


def attempted(row: Row, measured: Callable[[], Row]) -> Row:
    """Returns a row with what is measured, or with why it failed: one that has no room costs no
    other its measurement."""
    try:
        return row | measured()
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {error}"[-600:]}


def milliseconds(seconds: Sequence[float]) -> Row:
    """Returns the median of times, and how far apart the least and the most are."""
    spread = max(seconds) - min(seconds)
    return {"ms": 1e3 * statistics.median(seconds), "spread_ms": 1e3 * spread}


def over(row: Row, baseline: Row | None, name: str, field: str = "ms") -> Row:
    """Returns a row that tells, by `name`, its `field` over that of another, where both have it."""
    if baseline is None or field not in row or field not in baseline:
        return row
    return row | {name: row[field] / baseline[field]}


def failed(row: Row) -> bool:
    """Returns whether a measurement failed, or is of a wrong result."""
    return bool(row.get("failed")) or not (row.get("check") or {"passed": True})["passed"]


def shown(row: Row) -> str:
    """Returns a row as a line to read: of a spread the median, a check only if it is not passed,
    and no profile."""
    parts = []
    for name, value in row.items():
        match name, value:
            case ("check", {"passed": True}) | ("kernels", dict()):
                continue
            case "shape", dict():
                parts.append("×".join(map(str, value.values())))
            case "failed" | "refused", str():
                parts.append(f"{name}: {value}")
            case _, {"median": median}:
                parts.append(f"{name} {median:,.1f} µs")
            case _, float():
                parts.append(f"{name} {value:,.4g}")
            case _:
                parts.append(value if isinstance(value, str) else f"{name} {value}")
    return "  ".join(parts)
