"""Makes the measured parts of the documentation from the committed results: no number is typed.

    python tools/measured.py    write the tables that README and pages quote, docs/measured.md and
                                docs/figures/*.svg

mkdocs runs it before it builds the site; docs/measured.md and the figures are not committed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools import bank_tables, figures, quoted
from tools.measurements import ROOT


def measured() -> str:
    """Returns the page of everything that was measured."""
    parts = [
        "# Measured",
        "Medians of device time. The floor is the time of the bytes at the copy rate of the same "
        "run, or of the products at its bf16 rate, whichever is longer.",
    ]
    for name, found in quoted.reports().items():
        environment = found.header["environment"]
        versions = ", ".join(f"{key} {environment[key]}" for key in ("jax", "torch", "triton"))
        parts.append(f"## {Path(name).stem}")
        parts.append(
            f"`{name}`: {environment['card']}, {versions}, commit {environment['commit']}."
        )
        parts.append(found.text())
    parts.append("## Many adapters in one batch: `benchmarks/results/h100/bank.jsonl`")
    parts.append(bank_tables.every_bank())
    return "\n\n".join(parts) + "\n"


def write(docs: Path = ROOT / "docs") -> None:
    """Writes measured.md and the figures."""
    figures.write(docs / "figures")
    (docs / "measured.md").write_text(measured())


def on_pre_build(config: Any) -> None:
    """Runs before mkdocs reads the pages: a hook of mkdocs.yml."""
    write()


if __name__ == "__main__":
    for path in (ROOT / name for name in quoted.PAGES):
        path.write_text(quoted.updated(path.read_text()))
    write()
