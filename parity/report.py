"""The verdicts, as a table on the terminal, as JSON and as Markdown."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import torch
from rich.console import Console
from rich.table import Table

from parity.compare import Row

COLUMNS = (
    "level",
    "quantity",
    "dtype",
    "JAX / torch",
    "cases",
    "JAX vs fp64",
    "torch vs fp64",
    "JAX vs torch",
    "tolerance",
    "of allowed",
    "verdict",
)


@dataclass
class Report:
    device: str
    commit: str | None = None  # asked of git when None
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # wall time per case
    figures: list[str] = field(default_factory=list)  # file names beside the report
    facts: dict[str, object] = field(default_factory=dict)  # what is worth knowing, without verdict

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    def as_dict(self) -> dict:
        return {
            "passed": self.passed,
            "environment": environment(self.device, self.commit),
            "seconds": self.seconds,
            "facts": self.facts,
            "figures": self.figures,
            "rows": [row.as_dict() for row in self.rows],
        }

    def write(self, folder: Path) -> None:
        """`parity.json` and `parity.md` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        # JSON has no infinity: what is infinitely wrong, or allowed anything, is null.
        text = json.dumps(finite(self.as_dict()), indent=1, allow_nan=False)
        (folder / "parity.json").write_text(text + "\n")
        (folder / "parity.md").write_text(self.markdown())

    def markdown(self) -> str:
        versions = environment(self.device, self.commit)
        lines = [
            "# Parity",
            "",
            f"{'Every check passed.' if self.passed else 'SOME CHECKS FAILED.'} "
            f"{len(self.rows)} comparisons on {versions['card']}.",
            "",
            *(f"- {name}: {value}" for name, value in versions.items()),
            *(f"- {name}: {_fact(value)}" for name, value in self.facts.items()),
            "",
            "Errors are the largest absolute differences over all elements of the row of the group "
            "that comes nearest to its tolerance, against a materialised fp64 computation; "
            "`of allowed` is that row's error in units of what is allowed. Tolerances and their "
            "derivations: `parity/tolerances.py`.",
            "",
            "## Summary",
            "",
            *markdown_table(COLUMNS, map(_cells, _groups(self.rows))),
            "",
            *(f"![{name}]({name})" for name in self.figures),
            "",
            "## Every case",
            "",
            *markdown_table(
                ("case", *COLUMNS[1:4], *COLUMNS[5:]),
                ([row.case, *_row_cells(row)] for row in self.rows),
            ),
            "",
        ]
        return "\n".join(lines)

    def print(self, console: Console) -> None:
        table = Table(title=f"Parity on {environment(self.device, self.commit)['card']}")
        for column in COLUMNS:
            numbers = column in COLUMNS[4:10]
            table.add_column(column, justify="right" if numbers else "left", no_wrap=numbers)
        for group in _groups(self.rows):
            cells = _cells(group)
            passed = all(row.passed for row in group)
            style = "green" if passed else "bold red"
            table.add_row(*cells[:-1], f"[{style}]{cells[-1]}[/{style}]")
        console.print(table)
        for row in self.rows:
            if not row.passed:
                console.print(
                    f"[bold red]FAILED[/bold red] {row.case}: {' '.join(_row_cells(row))}"
                )
        total = f"{sum(row.passed for row in self.rows)} of {len(self.rows)} comparisons passed"
        console.print(total, style="bold green" if self.passed else "bold red")


def environment(device: str, commit: str | None, others: Sequence[str] = ()) -> dict[str, str]:
    """What produced a report; `others` are packages to name beside those of every report."""
    card = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    packages = ("jax", "jaxlib", "flax", "torch", "triton", "numpy", *others)
    return {
        "commit": commit or _commit(),
        "card": card,
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "cuda (torch)": torch.version.cuda or "none",
        "kernels": "native" if device == "cuda" else "interpreted",
        "jax backend": jax.default_backend(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    root = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (" with changes" if dirty.strip() else "")


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one level, quantity, dtype and pair of implementations."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        key = (row.level, row.quantity, row.dtype, row.jax.implementation, row.torch.implementation)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _cells(group: list[Row]) -> list[str]:
    worst = max(group, key=lambda row: row.worst)
    cells = _row_cells(worst)
    passed = sum(row.passed for row in group)
    verdict = "pass" if passed == len(group) else f"FAIL {len(group) - passed}"
    return [worst.level, *cells[:3], str(len(group)), *cells[3:-1], verdict]


def _row_cells(row: Row) -> list[str]:
    return [
        row.quantity,
        row.dtype,
        f"{row.jax.implementation} / {row.torch.implementation}",
        f"{row.jax.error:.1e}",
        f"{row.torch.error:.1e}",
        f"{row.difference:.1e}",
        f"{max(row.jax.tolerance, row.torch.tolerance):.1e}",
        f"{row.worst:.2f}",
        "pass" if row.passed else f"FAIL {row.failure}".strip(),
    ]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header), *body]


def _fact(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: either is null."""
    match value:
        case dict():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case float() if value in (float("inf"), float("-inf")) or value != value:
            return None
        case _:
            return value
