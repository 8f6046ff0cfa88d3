"""The verdicts on whole models, as a table on the terminal, as JSON and as Markdown."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from parity.model.checks import Check, Verdict
from parity.model.execute import Executed
from parity.model.sizes import Run
from parity.report import environment, finite, markdown_table

PAIR_COLUMNS = (
    "systems",
    "logits, cosine",
    "1 - cosine",
    "logits, relative",
    "logits, max abs",
    "top-1",
    "KL per token",
    "|Δloss|",
    "adapter's gradient, relative",
    "adapter's gradient, cosine",
)
CHECK_COLUMNS = ("systems", "quantity", "value", "allowed", "verdict", "note")


@dataclass(frozen=True)
class Entry:
    """One run: what was computed, and what is to be said of it."""

    run: Run
    executed: Executed
    losses: dict[str, float]
    verdict: Verdict


@dataclass
class Report:
    device: str
    commit: str | None = None
    entries: list[Entry] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.entries) and all(entry.verdict.passed for entry in self.entries)

    def as_dict(self) -> dict:
        packages = ("transformers", "peft")
        return {
            "passed": self.passed,
            "environment": environment(self.device, self.commit, packages),
            "runs": [_entry_dict(entry) for entry in self.entries],
        }

    def write(self, folder: Path) -> None:
        """`model.json` and `model.md` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(self.as_dict()), indent=1, allow_nan=False)
        (folder / "model.json").write_text(text + "\n")
        (folder / "model.md").write_text(self.markdown())

    def markdown(self) -> str:
        facts = environment(self.device, self.commit, ("transformers", "peft"))
        lines = [
            "# Parity of whole models",
            "",
            "Every check passed." if self.passed else "SOME CHECKS FAILED.",
            "",
            *(f"- {name}: {value}" for name, value in facts.items()),
            "",
            "One decoder of Qwen3's design, with random weights and a DoRA adapter that is not at "
            "its start, in Flax through `jax_dora`, in transformers through `torch_dora`, in "
            "transformers through PEFT, and in fp64 with every adapted weight formed. `base` is "
            "the model without adapter: how far two frameworks lie apart without us. `1 - cosine` "
            "is of all logits of the last tokens as one vector; KL is of the second system's "
            "prediction from the first's. Tolerances: `parity/tolerances.py`.",
            "",
        ]
        for entry in self.entries:
            lines += _entry_markdown(entry)
        return "\n".join(lines)

    def print(self, console: Console) -> None:
        for entry in self.entries:
            _print_entry(entry, console)
        style = "bold green" if self.passed else "bold red"
        console.print("every check passed" if self.passed else "SOME CHECKS FAILED", style=style)


def _entry_dict(entry: Entry) -> dict:
    executed, verdict = entry.executed, entry.verdict
    return {
        "name": entry.run.name,
        "passed": verdict.passed,
        **dataclasses.asdict(entry.run),
        "seconds": executed.seconds,
        "free_gib_after": executed.free,
        "losses": entry.losses,
        "errors": dict(verdict.errors),
        "checks": [check.as_dict() for check in verdict.checks],
        "pairs": [pair.as_dict() for pair in verdict.pairs],
    }


def _entry_markdown(entry: Entry) -> list[str]:
    sizes, verdict = entry.run.sizes, entry.verdict
    kinds = sorted({kind for pair in verdict.pairs for kind in pair.gradients})
    compared = [pair for pair in verdict.pairs if pair.gradients]
    return [
        f"## {entry.run.name}",
        "",
        f"Width {sizes.hidden}, MLP {sizes.intermediate}, {sizes.heads}/{sizes.kv_heads} heads of "
        f"{sizes.head_dim}, vocabulary {sizes.vocabulary}; r = {sizes.rank}, alpha = "
        f"{sizes.alpha}, rsLoRA. Logits and loss of the last {entry.run.last} tokens.",
        "",
        *(f"**{name} failed:** {error}" for name, error in verdict.errors.items()),
        "",
        *markdown_table(PAIR_COLUMNS, _pair_cells(entry)),
        "",
        *markdown_table(CHECK_COLUMNS, map(_check_cells, verdict.checks)),
        "",
        "Relative difference of the gradients, ‖a - b‖ / ‖b‖:",
        "",
        *markdown_table(
            ("systems", *kinds),
            (
                [f"{p.first}, {p.second}", *(f"{p.gradients[k].relative:.1e}" for k in kinds)]
                for p in compared
            ),
        ),
        "",
        "Seconds, with compilation: "
        + ", ".join(f"{name} {value:.1f}" for name, value in entry.executed.seconds.items())
        + ".",
        "",
    ]


def _pair_cells(entry: Entry) -> list[list[str]]:
    rows = []
    for pair in entry.verdict.pairs:
        logits, adapter = pair.logits, pair.adapter
        rows.append(
            [
                f"{pair.first}, {pair.second}",
                f"{1 - logits.distance.cosine:.9f}",
                f"{logits.distance.cosine:.1e}",
                f"{logits.distance.relative:.1e}",
                f"{logits.distance.peak:.1e}",
                f"{100 * logits.top1:.2f} %",
                f"{logits.kl_mean:.1e}",
                f"{abs(pair.loss):.1e}",
                "" if adapter is None else f"{adapter.relative:.1e}",
                "" if adapter is None else f"{1 - adapter.cosine:.9f}",
            ]
        )
    return rows


def _check_cells(check: Check) -> list[str]:
    verdict = "pass" if check.passed else "FAIL"
    value, allowed = f"{check.value:.2e}", f"{check.allowed:.2e}"
    return [check.systems, check.quantity, value, allowed, verdict, check.note]


def _print_entry(entry: Entry, console: Console) -> None:
    table = Table(title=f"Model: {entry.run.name}")
    for column in PAIR_COLUMNS:
        first = column == "systems"
        table.add_column(column, justify="left" if first else "right", no_wrap=first)
    for cells in _pair_cells(entry):
        table.add_row(*cells)
    console.print(table)
    checks = entry.verdict.checks
    for name, error in entry.verdict.errors.items():
        console.print(f"[bold red]FAILED[/bold red] {name}: {error}", highlight=False)
    for check in checks:
        # Of the gradients by kind, only those that failed.
        if not check.passed or not check.quantity.startswith("gradient of"):
            style = "green" if check.passed else "bold red"
            cells = _check_cells(check)
            console.print(f"[{style}]{cells[4]}[/{style}] {' | '.join(cells)}", highlight=False)
    console.print(f"{sum(c.passed for c in checks)} of {len(checks)} checks passed")
