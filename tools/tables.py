"""What the comments of `tools.pages` call: rows of results, and tables of them in Markdown."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import Report, label, time
from benchmarks.results import Row, read
from benchmarks.results import row as row
from benchmarks.results import rows as rows
from benchmarks.scaling import Measured as Measured
from benchmarks.work import BEST_LORA
from parity import report as parity_report
from tools.small_memory import memory as memory

__all__ = [
    "Measured",
    "Report",
    "agreement",
    "comparisons",
    "environment",
    "gib",
    "joined",
    "memory",
    "outcomes",
    "ratio",
    "row",
    "rows",
    "span",
    "table",
    "timed",
]
ROOT = Path(__file__).parents[1]


def filled(template: str, names: Mapping[str, Any]) -> str:
    """Returns the text of an f-string with these names."""
    return eval(f"f'''{template}'''", dict(names))


def table(lines: Iterable[Row], columns: Mapping[str, str]) -> str:
    """Returns a table in Markdown with a line for each row.

    Args:
      columns: for each name of a column the f-string of its cells. Its names are the fields of the
        row, `line` is the row itself. A cell that needs a field that the row does not have is "–".

    Raises:
      ValueError: no row has the fields that a column needs.
    """
    cells = [[_cell(template, line) for template in columns.values()] for line in lines]
    for name, column in zip(columns, zip(*cells, strict=True), strict=True):
        if set(column) == {"–"}:
            raise ValueError(f"no row has the fields of the column {name!r}: {columns[name]}")
    parts = [[*columns], ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(part)} |" for part in parts)


def _cell(template: str, line: Row) -> str:
    names = {name: globals()[name] for name in __all__}
    try:
        return filled(template, names | line | {"line": line}).replace("|", "\\|")
    except (KeyError, NameError):
        return "–"


def joined(lines: Iterable[Row], on: str, by: str) -> list[Row]:
    """Returns one row for all rows that have the same values of some fields.

    Args:
      on: the names of these fields, which the row has too.
      by: an f-string, as in `table`; its value for each of the rows is the name of a field that
        has that row.

    Raises:
      ValueError: two rows have the same values and the same name.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for line in lines:
        same = {name: line[name] for name in on.split() if name in line}
        one, name = found.setdefault(tuple(same.items()), same), filled(by, line | {"line": line})
        if name in one:
            raise ValueError(f"two rows have {same} and are called {name!r}")
        one[name] = line
    return [*found.values()]


def timed(name: str, card: str, **fields: Any) -> list[Row]:
    """Returns the correct measurements of operators, layers or models that have these fields.

    To the fields of the file are added those of `shape`, with `fan_in` for "in"; `label`, the
    framework and the variant; the medians `us` and `wall_us`; `of_lora` and `wall_of_lora`,
    relative to the best LoRA by XLA in the same file; and `of_floor`, the floor's share of `us`.
    """
    report = Report.committed(name, card)
    found = []
    for line in report.rows:
        sizes = {{"in": "fan_in"}.get(key, key): size for key, size in line["shape"].items()}
        described = line | sizes | {"label": label(line)}
        us, floor = time(line), report.floor_us(line)
        if us is None or any(described.get(key) != fields[key] for key in fields):
            continue
        measured = {
            "us": us,
            "wall_us": time(line, "wall"),
            "of_lora": report.ratio(line, "device", BEST_LORA),
            "wall_of_lora": report.ratio(line, "wall", BEST_LORA),
            "of_floor": floor and floor / us,
        }
        found.append(described | {key: value for key, value in measured.items() if value})
    return found


def comparisons(file: str) -> list[Row]:
    """Returns the rows of a parity report, such as "cuda/layer.jsonl"; those that are judged have
    `used`, the share of the tolerance that the error takes."""
    _, found = parity_report.read(ROOT / "parity" / "reports" / file)
    return [
        line | ({} if line["ok"] is None else {"used": parity_report.used(line)}) for line in found
    ]


def agreement(name: str, file: str) -> Row:
    """Returns how many comparisons of a parity report are within tolerance, and the largest share
    of a tolerance: of `JAX`, `torch` and `PEFT` compared with fp64, and with `each_other`."""
    judged = [line for line in comparisons(file) if "used" in line]
    card = environment(f"parity/reports/{file}")["card"]
    found: Row = {"name": name, "file": file, "card": card, "all": len(judged)}
    found["good"] = sum(line["ok"] for line in judged)
    for line in judged:
        sides = [side for side in (line["side"] or "").split(", ") if not side.startswith("fp64")]
        if sides and math.isfinite(line["used"]):
            [one, *others] = ("PEFT" if "peft" in side else side.split()[0] for side in sides)
            which = "each_other" if others else one.replace("jax", "JAX")
            found[which] = max(line["used"], found.get(which, 0.0))
    return found


def outcomes(file: str) -> list[Row]:
    """Returns for each planted fault and package the outcome by level, from a report of the level
    controls."""
    found = [line | {"outcome": parity_report.outcome(line)} for line in comparisons(file)]
    return joined(found, "case side", "{quantity}")


def environment(file: str) -> Row:
    """Returns commit, versions and card of a file, by its path in the checkout."""
    return read(ROOT / file)[0]["environment"]


def ratio(one: Row, other: Row, field: str = "ms") -> float:
    """Returns a field of one row divided by that of another."""
    return one[field] / other[field]


def span(numbers: Iterable[float], form: str) -> str:
    """Returns the least and the largest number, such as "0.91 to 1.00"."""
    found = sorted(numbers)
    return f"{found[0]:{form}} to {found[-1]:{form}}"


def gib(size: float, digits: int = 1) -> str:
    """Returns a number of bytes in GiB."""
    return f"{size / 2**30:.{digits}f}"
