"""Result files: JSON Lines, a header with commit, versions and card, then one measurement a line.

A file is written line by line, so that a run that is stopped keeps what it has measured.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parity.report import Writer as Writer
from parity.report import line as line

# The committed results, in a folder for each card.
FOLDER = Path(__file__).resolve().parent / "results"

Row = dict[str, Any]


def read(path: Path) -> tuple[Row, list[Row]]:
    """Returns the header and the rows of a file.

    Raises:
      ValueError: the file is empty, or its first line is not a header.
    """
    header, *rows = [json.loads(text) for text in path.read_text().splitlines()] or [{}]
    if "environment" not in header:
        raise ValueError(
            f"{path} does not begin with a header; expected an object with environment"
        )
    return header, rows


def rows(name: str, card: str, /, **fields: Any) -> list[Row]:
    """Returns the rows of `FOLDER`/card/name.jsonl with these values; None matches a missing
    field."""
    _, found = read(FOLDER / card / f"{name}.jsonl")
    return [row for row in found if all(row.get(key) == fields[key] for key in fields)]


def row(name: str, card: str, /, **fields: Any) -> Row:
    """Returns the only row of `rows` with the same arguments."""
    [only] = rows(name, card, **fields)
    return only


def attempt(row: Row, measure: Callable[[], Row]) -> Row:
    """Returns `row` with what `measure` returns, or with the exception in `failed`: a measurement
    that runs out of memory must not end the run."""
    try:
        return row | measure()
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {error}"[-600:]}


def milliseconds(seconds: Sequence[float]) -> Row:
    """Returns the median of several times, and the difference between the largest and smallest."""
    spread = max(seconds) - min(seconds)
    return {"ms": 1e3 * statistics.median(seconds), "spread_ms": 1e3 * spread}


def with_ratio(row: Row, baseline: Row | None, name: str, field: str = "ms") -> Row:
    """Returns `row` with its `field` divided by the baseline's, under `name`, if both have it."""
    if baseline is None or field not in row or field not in baseline:
        return row
    return row | {name: row[field] / baseline[field]}


def failed(row: Row) -> bool:
    """Returns whether a measurement failed, or its result is wrong."""
    return bool(row.get("failed")) or not (row.get("check") or {"passed": True})["passed"]


def describe(row: Row) -> str:
    """Returns a row as a line to read: the median of each spread, and a check only if it did not
    pass."""
    parts = []
    for name, value in row.items():
        match name, value:
            case "check", {"passed": True}:
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
