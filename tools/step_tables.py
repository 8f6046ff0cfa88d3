"""The tables of docs/step.md and docs/several-gpus.md, from the committed results."""

from __future__ import annotations

from typing import Any

from benchmarks.results import Row, row, rows
from benchmarks.scaling import Measured
from benchmarks.step_table import VARIANTS, by_operator
from tools.markdown import gib, grid, table

# The profiled programs: their name on the page, and their kind in the results.
PROFILED = {
    "DoRA": VARIANTS[0].name,
    "DoRA by XLA": "kernels of jax_dora off: XLA's DoRA",
    "LoRA": "LoRA in place of DoRA",
}
MODELS = {"qwen3": "12 layers", "llama3": "Llama-3-8B"}
LAYOUT_NAMES = {"alone": "one GPU"}
GAPS = "copies, and gaps between kernels"
# For each operator its number of launches (None for `GAPS`) and its milliseconds.
Profile = dict[str, tuple[float | None, float]]


def step_parts() -> str:
    """Returns the table of the cost of each part; ratios are to the first program of a run."""
    programs: dict[str, Row] = {}
    for line in rows("step_table", "h100"):
        programs.setdefault(line["kind"], line)
    lines = (
        [
            *(name, f"{line['ms']:.1f}", f"{line['over_first']:.3f}", gib(line["temp_bytes"])),
            f"{line['loss']:.3f}",
        ]
        for name, line in programs.items()
    )
    return table(["program", "ms", "of the first", "temporaries, GiB", "loss after 100"], lines)


def step_operators() -> str:
    """Returns the table of launches and times of each operator's kernels."""

    def cell(operator: str, profile: Profile) -> str:
        launches, ms = profile[operator]
        return f"{ms:.1f}" if launches is None else f"{launches:,.0f} / {ms:.1f}"

    profiles = {name: profile_of(kind) for name, kind in PROFILED.items()}
    operators = {name: name for name in profiles["DoRA"]}
    totals = (f"{sum(ms for _, ms in profile.values()):.1f}" for profile in profiles.values())
    text = grid("launches / ms", operators, profiles, cell)
    return f"{text}\n| the whole step | {' | '.join(totals)} |"


def profile_of(kind: str) -> Profile:
    line = rows("step_table", "h100", kind=kind)[0]
    operators = by_operator(line["kernels"])
    profile: Profile = {name: (count, us / 1e3) for name, (count, us) in operators.items()}
    return profile | {GAPS: (None, line["ms"] - sum(ms for _, ms in profile.values()))}


def step_torch() -> str:
    """Returns the table of torch_dora and PEFT."""
    return _torch_steps("step_torch", "h200")


def fsdp_torch() -> str:
    """Returns the same table under FSDP2."""
    return _torch_steps("scale_torch", "h200x2")


def _torch_steps(name: str, card: str) -> str:
    lines = []
    for line in rows(name, card):
        kind = line["kind"].partition(",")[0] + ", compiled" * ("compiled" in line["kind"])
        cells = [kind, f"{line['ms']:,.0f}", f"{line['tokens_per_s']:,.0f}"]
        lines.append([*cells, f"{line['over_lora']:.2f}", gib(line["peak_bytes"])])
    return table(["", "ms", "tokens/s", "of PEFT's LoRA", "peak GiB"], lines)


def devices() -> str:
    layouts = ("alone", "dp", "fsdp", "tp")

    def order(line: dict[str, Any]) -> tuple[int, ...]:
        named = (tuple(MODELS).index(line["model"]), line["rank"], layouts.index(line["layout"]))
        return *named, line["axes"] == "explicit"

    lines = []
    for card in ("h200", "h100"):
        for step in sorted(rows("scale", f"{card}x2", kind="DoRA", task="step"), key=order):
            fields = {name: step[name] for name in ("model", "rank", "layout", "axes")}
            layout = LAYOUT_NAMES.get(step["layout"], step["layout"])
            cells = [card.upper(), MODELS[step["model"]], str(step["rank"]), layout, step["axes"]]
            cells.append(str(step.get("calls", 1)))
            for task in ("inference", "step"):
                lora, dora = (
                    row("scale", f"{card}x2", kind=kind, task=task, **fields)
                    for kind in ("LoRA", "DoRA")
                )
                cells += [f"{lora['ms']:.1f} / {dora['ms']:.1f}", f"{dora['ms'] / lora['ms']:.3f}"]
            lines.append([*cells, f"{gib(lora['temp_bytes'], 2)} / {gib(dora['temp_bytes'], 2)}"])
    header = ("inference", "ratio", "step", "ratio", "temporaries of a step, GiB")
    return table(["card", "model", "rank", "layout", "axes", "calls", *header], lines)


def in_a_row() -> str:
    """Returns the table of steps in series, and of steps that keep the inner result."""
    kinds, lines = ("LoRA", "DoRA", "DoRA, inner kept"), []
    for lora in rows("scale_in_a_row", "h200x2", kind="LoRA"):
        fields = {name: lora[name] for name in ("model", "rank", "layout", "calls")}
        found = {line["kind"]: line for line in rows("scale_in_a_row", "h200x2", **fields)}
        layout = LAYOUT_NAMES.get(lora["layout"], lora["layout"])
        cells = [MODELS[lora["model"]], str(lora["rank"]), layout, str(lora["calls"])]
        for kind in kinds:
            line = found.get(kind, {})
            ratio = f" ({line['over_lora']:.3f})" if "over_lora" in line else ""
            cells.append(f"{line['ms']:.1f}{ratio}" if line else "–")
        cells.append(" / ".join(gib(line["temp_bytes"], 2) for line in found.values()))
        lines.append(cells)
    return table(["model", "rank", "layout", "calls", *kinds, "temporaries, GiB"], lines)


def more_gpus() -> str:
    """Returns the table of predicted steps on more GPUs, by the formula of `benchmarks.scaling`."""
    measured, lines = Measured.read(), []
    for count in (2, 8, 64, 512):
        cells = [str(count)]
        for layout in ("dp", "fsdp", "hybrid"):
            lora, dora = (measured.predicted(kind, layout, count) for kind in ("LoRA", "DoRA"))
            cells += [f"{lora:.1f} / {dora:.1f}", f"{dora / lora:.2f}"]
        lines.append(cells)
    layouts = ("dp", "fsdp", "fsdp=8, dp between hosts")
    return table(["GPUs", *(name for layout in layouts for name in (layout, "ratio"))], lines)
