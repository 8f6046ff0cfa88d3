"""The tables of a step part by part, from the committed results."""

from __future__ import annotations

from typing import Any

from benchmarks.step_table import VARIANTS, by_operator
from tools.measurements import grid, rows, table

# What the profile compares: the name on the page, and that in the results.
PROFILED = {
    "DoRA": VARIANTS[0].name,
    "DoRA by XLA": "kernels of jax_dora off: XLA's DoRA",
    "LoRA": "LoRA in place of DoRA",
}
GAPS = "copies, and gaps between kernels"
# By operator, launches, where they were counted, and milliseconds.
Profile = dict[str, tuple[float | None, float]]


def step_parts() -> str:
    """Returns the table of what each part costs: a ratio is to the first program of its own run."""
    first: dict[str, Any] = {}
    for found in rows("step_table", "h100"):
        first.setdefault(found["kind"], found)
    columns = {
        "ms": lambda found: f"{found['ms']:.1f}",
        "of the first": lambda found: f"{found['over_first']:.3f}",
        "temporaries, GiB": lambda found: f"{found['temp_bytes'] / 2**30:.1f}",
        "loss after 100": lambda found: f"{found['loss']:.3f}",
    }
    return grid("program", first, columns, lambda found, cell: cell(found))


def step_operators() -> str:
    """Returns the table of launches and times of each operator's kernels."""

    def cell(operator: str, profile: Profile) -> str:
        launches, ms = profile[operator]
        return f"{ms:.1f}" if launches is None else f"{launches:,.0f} / {ms:.1f}"

    profiles = {name: profile_of(kind) for name, kind in PROFILED.items()}
    operators = {name: name for name in profiles["DoRA"]}
    whole = (f"{sum(ms for _, ms in profile.values()):.1f}" for profile in profiles.values())
    shown = grid("launches / ms", operators, profiles, cell)
    return f"{shown}\n| the whole step | {' | '.join(whole)} |"


def profile_of(kind: str) -> Profile:
    found = rows("step_table", "h100", kind=kind)[0]
    operators = by_operator(found["kernels"])
    profile: Profile = {name: (count, us / 1e3) for name, (count, us) in operators.items()}
    return profile | {GAPS: (None, found["ms"] - sum(ms for _, ms in profile.values()))}


def step_torch() -> str:
    """Returns the table of torch_dora beside PEFT."""
    return _beside_peft("step_torch", "h200")


def fsdp_torch() -> str:
    """Returns the same under FSDP2."""
    return _beside_peft("scale_torch", "h200x2")


def _beside_peft(name: str, card: str) -> str:
    lines = [
        [
            found["kind"].partition(",")[0] + (", compiled" if "compiled" in found["kind"] else ""),
            f"{found['ms']:,.0f}",
            f"{found['tokens_per_s']:,.0f}",
            f"{found['over_lora']:.2f}",
            f"{found['peak_bytes'] / 2**30:.1f}",
        ]
        for found in rows(name, card)
    ]
    return table(["", "ms", "tokens/s", "of PEFT's LoRA", "peak GiB"], lines)
