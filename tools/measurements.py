"""Lines and measurements of the committed results, by what they are of, and tables in Markdown."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.report import Report, label

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEST_LORA = "the best jax LoRA"
WITHOUT_TRITON = " (no Triton)"


def table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    header = list(header)
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    )


def grid[L, C](
    corner: str, lines: Mapping[str, L], columns: Mapping[str, C], cell: Callable[[L, C], str]
) -> str:
    """Returns a table with a cell for every line and column, both by their headings."""
    named = ([name, *(cell(line, one) for one in columns.values())] for name, line in lines.items())
    return table([corner, *columns], named)


def report(name: str, card: str = "h200") -> Report:
    """Returns a file of results of operators, layers or models."""
    return Report.read(RESULTS / card / f"{name}.jsonl")


def rows(name: str, card: str, /, **fields: Any) -> list[results.Row]:
    """Returns the lines of a file of results that have `fields`; None: that lack one."""
    _, found = results.read(RESULTS / card / f"{name}.jsonl")
    return [line for line in found if all(line.get(key) == fields[key] for key in fields)]


def row(name: str, card: str, /, **fields: Any) -> results.Row:
    """Returns the one line of a file of results that has `fields`."""
    [only] = rows(name, card, **fields)
    return only


def one(of: Report, group: str, by: str, **shape: int) -> results.Row:
    """Returns the one row of `group` whose label is `by` and whose shape has these sizes."""
    [only] = (
        row
        for row in of.rows
        if (row["group"], label(row)) == (group, by) and shape.items() <= row["shape"].items()
    )
    return only
