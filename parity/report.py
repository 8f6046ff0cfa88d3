"""Reports: JSON Lines, written one comparison at a time, and tables printed from them.

The first line of a file is its header, `{"kind": "parity", "level": …, "environment": {…}, …}`.
Every other line is a comparison or a fact, with these fields:

    case, quantity, side    what was computed, which of its results, and by which side
    error, bound, ok        the largest error, its limit, and the verdict; `ok` is null if nothing
                            is judged
    note                    an error message or a remark
    …                       other measurements, such as `plain`, `peak`, `seconds`

A line with lists represents one row per list element. So one line has the errors of both frameworks
for a quantity, and the difference between the frameworks. Numbers that JSON cannot represent
(infinity, NaN) are null. `read` expands the lists.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

DIGITS = 9  # significant digits in a report: enough to distinguish any two fp32 numbers
COLUMNS = ("quantity", "side", "rows", "nearest to its bound", "error", "bound", "used", "verdict")


class Writer:
    """Writes a JSON Lines file, creating its folder: a header, then one row per `add`. A row is on
    disk when `add` returns."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        path.write_text(line(header), encoding="utf-8")

    def add(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line(row))


class Report:
    """The results of one level, written to disk as soon as they are known.

    Attributes:
      rows: the rows added so far, one per side, as `read` returns them.
    """

    def __init__(self, path: Path | None, level: str, environment: Mapping[str, str], **facts: Any):
        """Starts the file or, if `path` is None, a report in memory only; `facts` go into the
        header."""
        self.path, self.rows = path, []
        self.header = {"kind": "parity", "level": level, "environment": dict(environment), **facts}
        self._writer = Writer(path, self.header) if path else None

    def add(self, case: str, quantity: str | Sequence[str], **values: Any) -> None:
        """Adds a line. If a value is a list, it has one element for each row of the line."""
        added = {"case": case, "quantity": quantity, **values}
        self.rows += _rows(added)
        if self._writer:
            self._writer.add(added)

    @property
    def passed(self) -> bool:
        """Returns whether something was judged and nothing failed."""
        return passed(self.rows)

    def finish(self) -> int:
        """Prints the report and returns a command's exit code."""
        print(text(self.header, self.rows))
        print(f"written: {self.path}")
        return 0 if self.passed else 1


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Returns a report's header and rows. Every row has the fields case, quantity, side, error,
    bound, ok and note.

    Raises:
      ValueError: the file is not a report of parity.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is not a report in JSON Lines format: {error}") from error
    header = lines[0] if lines else {}
    if not isinstance(header, dict) or header.get("kind") != "parity":
        raise ValueError(f"{path} does not begin with a header of kind 'parity'; got {header}")
    return header, [row for line in lines[1:] for row in _rows(line)]


def passed(rows: Iterable[Row]) -> bool:
    verdicts = [row["ok"] for row in rows if row["ok"] is not None]
    return bool(verdicts) and all(verdicts)


def used(row: Row) -> float:
    """Returns the error divided by its limit; infinity if the error is not a number."""
    error, bound, of_bound = row["error"], row["bound"], row.get("of_bound")
    if error is None or not math.isfinite(error):
        return 0.0 if error is None and row["ok"] else math.inf
    share = 0.0 if bound is None else error / bound if bound else math.inf * error
    # 0 · inf is NaN: the error and the bound are both 0.
    return max(0.0 if math.isnan(share) else share, of_bound or 0.0)


def text(header: Mapping[str, Any], rows: Sequence[Row], all_rows: bool = False) -> str:
    """Returns the report as Markdown.

    It has a line for every quantity and side (or for every planted fault), all failures, the facts
    that are not judged and, with `all_rows`, every row.
    """
    judged = [row for row in rows if row["ok"] is not None]
    failed = [row for row in judged if not row["ok"]]
    verdict = f"{len(judged) - len(failed)} of {len(judged)} comparisons passed"
    parts = [
        f"# Parity: {header['level']}",
        f"{'FAILED: ' if failed or not judged else ''}{verdict}.",
        "\n".join(f"- {name}: {value}" for name, value in header["environment"].items()),
    ]
    if header["level"] == "controls":
        return "\n\n".join([*parts, _matrix(judged)])
    parts += [table(COLUMNS, _summary(judged)), *_facts(rows)]
    if chosen := judged if all_rows else failed:
        each = table(("case", *COLUMNS[:2], *COLUMNS[4:], "note"), map(_judged, chosen))
        parts.append(f"## {'All' if all_rows else 'Failed'}\n\n{each}")
    return "\n\n".join(parts)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * max(3, width) for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(r, widths, strict=True)] for r in cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def finite(value: Any) -> Any:
    """Returns the value as JSON can represent it: numbers with `DIGITS` digits, null for infinity
    and NaN."""
    match value:
        case Mapping():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case float():
            return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
        case _:
            return value


def main(arguments: Sequence[str]) -> int:
    """Runs `python -m parity report FILE`; returns 1 if a comparison in a file failed."""
    parser = argparse.ArgumentParser(
        prog="python -m parity report", description="Prints a report as Markdown."
    )
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--all", action="store_true", help="every comparison, not only the worst")
    options = parser.parse_args(arguments)
    all_passed = True
    for file in options.file:
        try:
            header, rows = read(file)
        except (OSError, ValueError) as error:
            sys.exit(f"python -m parity report: {error}")
        print(text(header, rows, options.all))
        all_passed = all_passed and passed(rows)
    return 0 if all_passed else 1


def line(values: Mapping[str, Any]) -> str:
    """Returns the values as one line of JSON, with null for infinity and NaN."""
    return json.dumps(finite(values), allow_nan=False, ensure_ascii=False) + "\n"


def _rows(line: Mapping[str, Any]) -> Iterator[Row]:
    lengths = {len(value) for value in line.values() if isinstance(value, list | tuple)}
    if len(lengths) > 1:
        raise ValueError(f"a line's lists have lengths {sorted(lengths)}; expected one: {line}")
    names = dict.fromkeys(("case", "quantity", "side", "error", "bound", "ok", "note"))
    for index in range(*lengths or {1}):
        row = {k: v[index] if isinstance(v, list | tuple) else v for k, v in line.items()}
        yield names | row


def _summary(judged: Sequence[Row]) -> Iterator[list[str]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in judged:
        quantity = " ".join(filter(None, (row["quantity"], row.get("dtype"))))
        groups.setdefault((quantity, row["side"] or ""), []).append(row)
    for key, group in groups.items():
        nearest = max(group, key=used)
        failed = sum(not row["ok"] for row in group)
        verdict = f"FAIL {failed}" if failed else "pass"
        yield [*key, str(len(group)), nearest["case"], *_numbers(nearest), verdict]


def _judged(row: Row) -> list[str]:
    words = [row["case"], row["quantity"], row["side"] or ""]
    return [*words, *_numbers(row), "pass" if row["ok"] else "FAIL", row["note"] or ""]


def _numbers(row: Row) -> list[str]:
    return [_cell(row["error"]), _cell(row["bound"]), f"{used(row):.2f}"]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _facts(rows: Iterable[Row]) -> Iterator[str]:
    """Yields tables of the rows that are not judged, one table for all rows with the same
    columns."""
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for row in rows:
        if row["ok"] is None and row["quantity"] != "seconds":
            shown = {k: v for k, v in row.items() if v is not None and not isinstance(v, dict)}
            tables.setdefault(tuple(shown), []).append([_cell(value) for value in shown.values()])
    for columns, cells in tables.items():
        yield table(columns, cells)


def _matrix(rows: Sequence[Row]) -> str:
    """Returns the table of the levels that caught each fault in each package; the first row is
    without a fault."""
    levels = list(dict.fromkeys(row["quantity"] for row in rows))
    outcomes: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        outcomes.setdefault((row["case"], row["side"] or ""), {})[row["quantity"]] = outcome(row)
    lines = (
        [*fault, *(by_level.get(level, "not run") for level in levels)]
        for fault, by_level in outcomes.items()
    )
    return table(("fault", "planted in", *levels), lines)


def outcome(row: Row) -> str:
    """Returns the outcome of a row of the controls in words."""
    if row["note"]:
        return f"ERROR {row['note']}"
    if row["side"] is None:
        return "passes" if row["ok"] else f"FAILS: {row['failed']}"
    if not row["failed"]:
        return "MISSED" if row["expected"] else "–"
    word = "**caught**" if row["expected"] else "caught"
    return word if row["blamed"] else f"{word}, WRONG SIDE: {row['failed']}"
