"""Tables of numbers that pages quote, as the committed results have them.

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`. `python tools/measured.py`
writes them; a test holds the pages to the results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.report import Report, time
from benchmarks.report import name as work_name
from benchmarks.scaling import Measured
from tools import bank_tables, quantised_tables, small_memory, step_parts
from tools.measurements import (
    BEST_LORA,
    RESULTS,
    ROOT,
    WITHOUT_TRITON,
    grid,
    one,
    report,
    row,
    rows,
    table,
)

PAGES = (
    *("docs/performance.md", "docs/serving.md", "docs/several-gpus.md", "docs/step.md"),
    *("README.md", "docs/small-memory.md"),
)
MARKS = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
RANK = 384
PEFT_WAYS = {
    "torch_dora": "torch torch_dora",
    "PEFT's DoRA, defaults": "torch PEFT DoRA, defaults",
    "PEFT's DoRA, bf16, compiled": "torch PEFT DoRA, bf16, compiled",
}


def updated(page: str) -> str:
    """Returns a page with its tables as the results have them."""
    return MARKS.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", page)


def reports() -> dict[str, Report]:
    """Returns the benchmarks of operators, layers and models by their path in the checkout."""
    paths = sorted(RESULTS.glob("h200/*.jsonl"))
    return {
        path.relative_to(ROOT).as_posix(): Report.read(path)
        for path in paths
        if results.read(path)[0]["kind"] == "benchmark"
    }


def headline() -> str:
    """Returns README's part: what agrees, and DoRA in JAX beside the best LoRA in JAX."""
    agreement = []
    for path in sorted((ROOT / "parity/reports/cuda").glob("*.jsonl")):
        header, lines = results.read(path)
        judged = [line["ok"] for line in lines if line.get("ok") is not None]
        good = sum(all(ok) if isinstance(ok, list) else ok for ok in judged)
        card = header["environment"]["card"]
        agreement.append((header["level"], card, f"{good} of {len(judged)}", _link(path)))
    ways = {
        f"DoRA{kept}{WITHOUT_TRITON}": name
        for kept, name in (
            ("", "norm in every call"),
            (", norm kept", "norm kept"),
            (", norm and inner kept", "norm and inner kept"),
        )
    }
    speed: dict[str, dict[str, list[float]]] = {}
    sources: dict[str, dict[str, None]] = {}
    for path, found in reports().items():
        for m in found.rows:
            way, ratio = m["variant"], found.ratio(m, baseline=BEST_LORA)
            if m["framework"] == "jax" and way in ways and m["shape"]["rank"] == RANK and ratio:
                speed.setdefault(work_name(m), {}).setdefault(way, []).append(ratio)
                sources.setdefault(work_name(m), {})[_link(ROOT / path)] = None
    lines = (
        (work, *(_range(of.get(way, [])) for way in ways), ", ".join(sources[work]))
        for work, of in speed.items()
    )
    parts = [
        table(("comparison", "card", "within tolerance", "from"), agreement),
        "Device time of DoRA over that of the best plain LoRA that XLA gives in the same run; of "
        "several runs, the least and the most:",
        table(("work", *ways.values(), "from"), lines),
        "More in [`docs/performance.md`](docs/performance.md).",
    ]
    return "\n\n".join(parts)


def _link(path: Path) -> str:
    return f"[`{path.name}`]({path.relative_to(ROOT).as_posix()})"


def _range(ratios: Sequence[float]) -> str:
    ends = [f"{end:.2f}×" for end in sorted({min(ratios), max(ratios)})] if ratios else ["–"]
    return " to ".join(dict.fromkeys(ends))


def _time(m: results.Row, clock: str = "device") -> float:
    """Returns microseconds, NaN where there are none to be trusted."""
    return time(m, clock) or math.nan


def _ratio(of: Report, m: results.Row, clock: str = "device") -> str:
    return f"{of.ratio(m, clock, BEST_LORA):.2f}"


def _sizes(*shapes: tuple[int, int], axes: Sequence[str]) -> dict[str, dict[str, int]]:
    return {" × ".join(map(str, shape)): dict(zip(axes, shape, strict=True)) for shape in shapes}


def norm() -> str:
    ways = {
        "jax_dora": "jax mosaic",
        "XLA, factored": "jax factored",
        "XLA, dense": "jax dense",
        "torch_dora": "torch triton",
        "PEFT": "torch PEFT",
        "the paper's way": "torch the paper's",
    }
    sizes = _sizes((4096, 4096), (8192, 8192), (8192, 28672), (28672, 8192), axes=("in", "out"))
    ops = report("ops")

    def cell(shape: dict[str, int], label: str) -> str:
        return f"{_time(one(ops, 'norm', label, **shape, rank=RANK)):,.1f}"

    return grid("in × out", sizes, ways, cell)


def compose() -> str:
    columns = {
        "forward: XLA": ("compose", "jax xla"),
        "forward: Mosaic": ("compose", "jax mosaic"),
        "backward: XLA": ("backward, d_base", "jax xla"),
        "backward: Mosaic": ("backward, d_base", "jax mosaic"),
        "backward: Triton": ("backward, d_base", "torch triton"),
    }
    sizes = _sizes((2048, 2048), (4096, 4096), (4096, 8192), (4096, 28672), axes=("rows", "out"))
    ops = report("ops")

    def cell(shape: dict[str, int], way: tuple[str, str]) -> str:
        return f"{_time(one(ops, *way, **shape)):,.1f}"

    return grid("rows × out", sizes, columns, cell)


def layer() -> str:
    columns = {
        f"{group}{kept}": (f"layer {group}", f"jax DoRA{kept}{WITHOUT_TRITON}")
        for group in ("forward", "forward+backward")
        for kept in ("", ", norm kept")
    }
    sizes = _sizes((8192, 8192), (4096, 4096), (4096, 14336), axes=("in", "out"))
    layers = report("layer")

    def cell(shape: dict[str, int], way: tuple[str, str]) -> str:
        return _ratio(layers, one(layers, *way, **shape, rank=RANK))

    return grid("in × out", sizes, columns, cell)


def layer_times() -> str:
    ways = {
        "jax_dora": f"jax DoRA{WITHOUT_TRITON}",
        "jax_dora, norm kept": f"jax DoRA, norm kept{WITHOUT_TRITON}",
        "LoRA by XLA": f"jax LoRA{WITHOUT_TRITON}",
        "DoRA by XLA": f"jax XLA DoRA{WITHOUT_TRITON}",
        **PEFT_WAYS,
    }
    layers, groups = report("layer"), ("forward", "forward+backward")
    shape = {"in": 8192, "out": 8192, "rank": RANK}

    def cell(label: str, group: str) -> str:
        return f"{_time(one(layers, f'layer {group}', label, **shape)):,.0f}"

    return grid("", ways, {group: group for group in groups}, cell)


def model() -> str:
    ways = {
        "LoRA by XLA": f"jax LoRA{WITHOUT_TRITON}",
        "jax_dora, norm kept": f"jax DoRA, norm kept{WITHOUT_TRITON}",
        **PEFT_WAYS,
    }
    columns = {
        f"{task}{told}": (task, clock)
        for task in ("inference", "gradient")
        for told, clock in (("", "device"), (", wall", "wall"))
    }
    models = report("model")

    def cell(label: str, column: tuple[str, str]) -> str:
        task, clock = column
        m = one(models, f"model {task}", label)
        return _gib(m["peak_bytes"]) if clock == "peak" else f"{_time(m, clock) / 1e3:,.1f}"

    return grid("", ways, columns | {"peak GiB, gradient": ("gradient", "peak")}, cell)


def model_later() -> str:
    gradient, every_call = "model_gradient", "model_norm_every_call"
    ways = {
        "LoRA by XLA": (gradient, "LoRA"),
        "norm kept": (gradient, "DoRA, norm kept"),
        "norm and inner kept": (gradient, "DoRA, norm and inner kept"),
        "norm in every call": (every_call, "DoRA"),
    }
    lines = []
    for name, (file, variant) in ways.items():
        models = report(file)
        m = one(models, "model gradient", f"jax {variant}{WITHOUT_TRITON}")
        of_lora = ["", ""] if "baseline" in m else [_ratio(models, m), _ratio(models, m, "wall")]
        time = f"{_time(m) / 1e3:.1f}"
        lines.append([name, time, *of_lora, _gib(m["peak_bytes"]), f"`{file}.jsonl`"])
    return table(["", "gradient", "of LoRA's", "wall, of LoRA's", "peak GiB", "from"], lines)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def step() -> str:
    budgets = {
        "all that fits, layers unrolled": "all kept that fits, unrolled",
        "all that fits, layers in a scan": "all kept that fits",
        "12 GiB": "12 GiB",
        "nothing: every layer rematerialised": "every layer rematerialised",
    }
    columns = {
        f"{card}: {name}": (card.lower(), kind, field)
        for card in ("H100", "H200")
        for name, kind, field in (
            ("LoRA", "LoRA", "tokens_per_s"),
            ("DoRA", "DoRA", "tokens_per_s"),
            ("its time", "DoRA", "over_lora"),
        )
    }

    def cell(budget: str, column: tuple[str, str, str]) -> str:
        card, kind, field = column
        digits = ".3f" if field == "over_lora" else ",.0f"
        found = rows("step", card, kind=kind, budget=budget)
        return format(found[0][field], digits) if found else ""

    return grid("what is kept for the gradient", budgets, columns, cell)


def devices() -> str:
    layouts, models = ("alone", "dp", "fsdp", "tp"), {"qwen3": "12 layers", "llama3": "Llama-3-8B"}

    def place(line: dict[str, Any]) -> tuple[int, ...]:
        named = (tuple(models).index(line["model"]), line["rank"], layouts.index(line["layout"]))
        return *named, line["axes"] == "explicit"

    lines = []
    for step in sorted(rows("scale", "h200x2", kind="DoRA", task="step"), key=place):
        fields = {name: step[name] for name in ("model", "rank", "layout", "axes")}
        layout = {"alone": "one GPU"}.get(step["layout"], step["layout"])
        cells = [models[step["model"]], str(step["rank"]), layout, step["axes"]]
        for task in ("inference", "step"):
            lora, dora = (
                row("scale", "h200x2", kind=kind, task=task, **fields) for kind in ("LoRA", "DoRA")
            )
            cells += [f"{lora['ms']:.1f} / {dora['ms']:.1f}", f"{dora['ms'] / lora['ms']:.3f}"]
        temporaries = (line["temp_bytes"] / 2**30 for line in (lora, dora))
        lines.append([*cells, " / ".join(f"{gib:.2f}" for gib in temporaries)])
    header = ("inference", "ratio", "step", "ratio", "temporaries of a step, GiB")
    return table(["model", "rank", "layout", "axes", *header], lines)


def layer_sizes() -> str:
    """Returns the table of one layer's kernel time beside LoRA's."""
    tasks = {"decode": "a frozen layer's call", "gradient": "forward and backward"}
    lines = []
    for dora in rows("sizes", "h200", kind="DoRA"):
        same = {key: dora[key] for key in ("task", "rows", "fan_in", "out", "rank")}
        lora = row("sizes", "h200", kind="LoRA", **same)
        size = f"{dora['rows']:,} × {dora['fan_in']} × {dora['out']}"
        times = (f"{one['us']:.1f}" for one in (lora, dora))
        cells = [tasks[dora["task"]], size, str(dora["rank"]), *times]
        lines.append([*cells, f"{dora['over_lora']:.3f}"])
    return table(["", "rows × in × out", "rank", "LoRA, µs", "DoRA, µs", "ratio"], lines)


def more_gpus() -> str:
    """Returns the table of what more GPUs would take, by the formula of `benchmarks.scaling`."""
    measured, lines = Measured.read(), []
    for devices in (2, 8, 64, 512):
        cells = [str(devices)]
        for layout in ("dp", "fsdp", "hybrid"):
            lora, dora = (measured.predicted(kind, layout, devices) for kind in ("LoRA", "DoRA"))
            cells += [f"{lora:.1f} / {dora:.1f}", f"{dora / lora:.2f}"]
        lines.append(cells)
    ways = ("dp", "fsdp", "fsdp=8, dp between hosts")
    return table(["GPUs", *(name for way in ways for name in (way, "ratio"))], lines)


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        *(headline, norm, compose, layer, layer_times, model, model_later, layer_sizes, step),
        *(devices, more_gpus, quantised_tables.quantised_step, quantised_tables.quantised_norm),
        *(quantised_tables.quantised_rows, quantised_tables.quantised_projection),
        *(bank_tables.bank_bytes, bank_tables.bank_decoding, bank_tables.bank_prompts),
        *(bank_tables.bank_loads, bank_tables.bank_torch, bank_tables.bank_growth),
        *(bank_tables.bank_served, bank_tables.served_beside),
        *(small_memory.memory, small_memory.quality),
        *(step_parts.step_parts, step_parts.step_operators),
        *(step_parts.step_torch, step_parts.fsdp_torch),
    )
}
