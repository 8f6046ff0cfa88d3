"""Writes the measured parts of the documentation from the committed results.

    python tools/measured.py

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`; NAME is the name of a function
in `TABLES`. The command rewrites these tables, and writes docs/measured.md and docs/figures/*.svg,
which are not committed: mkdocs calls `on_pre_build` before it builds the site. Tests compare the
tables of the committed pages with the results.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools import figures, performance_tables, serving_tables, small_memory, step_tables
from tools.performance_tables import ROOT, reports

PAGES = (
    *("docs/performance.md", "docs/serving.md", "docs/several-gpus.md", "docs/step.md"),
    "docs/small-memory.md",
)
TABLES = {
    name: getattr(module, name)
    for module, names in {
        performance_tables: "norm compose layer layer_times model model_later layer_sizes "
        "step quantised_step quantised_norm quantised_rows quantised_decode quantised_products "
        "quantised_projection",
        serving_tables: "bank_decoding bank_prompts bank_loads bank_torch bank_growth "
        "bank_served served_beside",
        step_tables: "step_parts step_operators step_torch fsdp_torch devices in_a_row more_gpus",
        small_memory: "memory quality",
    }.items()
    for name in names.split()
}
MARKS = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(page: str) -> str:
    """Returns the text of a page with its tables made anew from the results."""
    return MARKS.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", page)


def measured() -> str:
    """Returns the page of all measurements of operators, layers, models and banks."""
    parts = [
        "# Measured",
        "Medians of device time. The floor is the time of the bytes at the copy rate of the same "
        "run, or of the products at its bf16 rate, whichever is longer.",
    ]
    for name, report in reports().items():
        environment = report.header["environment"]
        versions = ", ".join(f"{key} {environment[key]}" for key in ("jax", "torch", "triton"))
        parts.append(f"## {Path(name).stem}")
        parts.append(
            f"`{name}`: {environment['card']}, {versions}, commit {environment['commit']}."
        )
        parts.append(report.text())
    parts.append("## Many adapters in one batch: `benchmarks/results/h100/bank.jsonl`")
    parts.append(serving_tables.every_bank())
    return "\n\n".join(parts) + "\n"


def write(docs: Path = ROOT / "docs") -> None:
    """Writes measured.md and the figures."""
    figures.write(docs / "figures")
    (docs / "measured.md").write_text(measured())


def on_pre_build(config: Any) -> None:
    """Hook of mkdocs.yml."""
    write()


if __name__ == "__main__":
    for path in (ROOT / name for name in PAGES):
        path.write_text(updated(path.read_text()))
    write()
