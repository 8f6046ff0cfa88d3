"""A step part by part: its tables and its figure, from the committed results."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.step_table import VARIANTS, by_operator
from tools.measurements import rows, table

FIRST = VARIANTS[0].name
# What the profile compares: the name in the results, and that on the page.
PROFILED = {
    FIRST: "DoRA",
    "kernels of jax_dora off: XLA's DoRA": "DoRA by XLA",
    "LoRA in place of DoRA": "LoRA",
}


def step_parts() -> str:
    """Returns the table of what each part costs: a ratio is to the first program of its own run."""
    lines, seen = [], set()
    for found in rows("step_table", "h100"):
        if found["kind"] in seen:
            continue
        seen.add(found["kind"])
        time, memory = f"{found['ms']:.1f}", f"{found['temp_bytes'] / 2**30:.1f}"
        lines.append(
            [found["kind"], time, f"{found['over_first']:.3f}", memory, f"{found['loss']:.3f}"]
        )
    return table(["program", "ms", "of the first", "temporaries, GiB", "loss after 100"], lines)


def step_operators() -> str:
    """Returns the table of launches and times of each operator's kernels."""
    found = _profiles()
    lines = []
    for operator in next(iter(found.values())):
        cells = (f"{launches:,.0f} / {ms:.1f}" for launches, ms in _column(found, operator))
        lines.append([operator, *cells])
    whole = {name: _whole(name) for name in found}
    gaps = (
        f"{whole[name] - sum(ms for _, ms in operators.values()):.1f}"
        for name, operators in found.items()
    )
    lines.append(["copies, and gaps between kernels", *gaps])
    lines.append(["the whole step", *(f"{ms:.1f}" for ms in whole.values())])
    return table(["launches / ms", *(PROFILED[name] for name in found)], lines)


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


def figure() -> Figure:
    """Draws the time of a step by operator, for each program."""
    drawn = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = drawn.subplots()
    found = _profiles()
    names = [PROFILED[name] for name in found]
    left = [0.0] * len(found)
    for operator in next(iter(found.values())):
        times = [ms for _, ms in _column(found, operator)]
        axes.barh(names, times, left=left, label=operator)
        left = [start + ms for start, ms in zip(left, times, strict=True)]
    gaps = [_whole(name) - end for name, end in zip(found, left, strict=True)]
    axes.barh(names, gaps, left=left, label="copies and gaps", color="#b0b0b0")
    axes.invert_yaxis()
    axes.set(xlabel="ms of a step")
    return drawn


Profile = dict[str, list[float]]


def _profiles() -> dict[str, Profile]:
    """Returns by program the launches and milliseconds of each operator."""
    found = {}
    for name in PROFILED:
        profile = by_operator(_first(name)["kernels"])
        found[name] = {key: [count, us / 1e3] for key, (count, us) in profile.items()}
    return found


def _first(name: str) -> results.Row:
    return rows("step_table", "h100", kind=name)[0]


def _whole(name: str) -> float:
    return _first(name)["ms"]


def _column(found: dict[str, Profile], operator: str) -> list[list[float]]:
    return [profile[operator] for profile in found.values()]
