"""Tables of numbers that pages quote, as the committed results have them.

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`. `python tools/measured.py`
writes them; a test holds the pages to the results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from benchmarks.report import Measurement, Report
from tools import bank_tables, step_parts
from tools.measurements import BEST_LORA, WITHOUT_TRITON, one, report, row, rows, table

PAGES = ("docs/performance.md", "docs/serving.md", "docs/several-gpus.md", "docs/step.md")
MARKS = re.compile(r"(?<=<!-- table: )(\w+)( -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)
RANK = 384


def updated(page: str) -> str:
    """Returns a page with its tables as the results have them."""
    return MARKS.sub(lambda found: f"{found[1]}{found[2]}{TABLES[found[1]]()}", page)


def _time(m: Measurement, clock: str = "device") -> float:
    """Returns microseconds, NaN where there are none to be trusted."""
    return m.time(clock) or math.nan


def _us(of: Report, group: str, label: str, **shape: int) -> str:
    return f"{_time(one(of, group, label, **shape)):,.1f}"


def _ratio(of: Report, m: Measurement, clock: str = "device") -> str:
    return f"{of.ratio(m, clock, BEST_LORA):.2f}"


def norm() -> str:
    ways = {
        "jax_dora": "jax mosaic",
        "XLA, factored": "jax factored",
        "XLA, dense": "jax dense",
        "torch_dora": "torch triton",
        "PEFT": "torch PEFT",
        "the paper's way": "torch the paper's",
    }
    ops, sizes = report("ops"), ((4096, 4096), (8192, 8192), (8192, 28672), (28672, 8192))
    lines = []
    for fan_in, out in sizes:
        shape = {"in": fan_in, "out": out, "rank": RANK}
        times = (_us(ops, "norm", label, **shape) for label in ways.values())
        lines.append([f"{fan_in} × {out}", *times])
    return table(["in × out", *ways], lines)


def compose() -> str:
    columns = {
        "forward: XLA": ("compose", "jax xla"),
        "forward: Mosaic": ("compose", "jax mosaic"),
        "backward: XLA": ("backward, d_base", "jax xla"),
        "backward: Mosaic": ("backward, d_base", "jax mosaic"),
        "backward: Triton": ("backward, d_base", "torch triton"),
    }
    ops, sizes = report("ops"), ((2048, 2048), (4096, 4096), (4096, 8192), (4096, 28672))
    lines = (
        [f"{count} × {out}", *(_us(ops, *way, rows=count, out=out) for way in columns.values())]
        for count, out in sizes
    )
    return table(["rows × out", *columns], lines)


def layer() -> str:
    columns = {
        f"{group}{kept}": (f"layer {group}", f"jax DoRA{kept}{WITHOUT_TRITON}")
        for group in ("forward", "forward+backward")
        for kept in ("", ", norm kept")
    }
    layers, lines = report("layer"), []
    for fan_in, out in ((8192, 8192), (4096, 4096), (4096, 14336)):
        shape = {"in": fan_in, "out": out, "rank": RANK}
        measured = (one(layers, *way, **shape) for way in columns.values())
        lines.append([f"{fan_in} × {out}", *(_ratio(layers, m) for m in measured)])
    return table(["in × out", *columns], lines)


def layer_times() -> str:
    ways = {
        "jax_dora": f"jax DoRA{WITHOUT_TRITON}",
        "jax_dora, norm kept": f"jax DoRA, norm kept{WITHOUT_TRITON}",
        "LoRA by XLA": f"jax LoRA{WITHOUT_TRITON}",
        "DoRA by XLA": f"jax XLA DoRA{WITHOUT_TRITON}",
        "torch_dora": "torch torch_dora",
        "PEFT's DoRA, defaults": "torch PEFT DoRA, defaults",
        "PEFT's DoRA, bf16, compiled": "torch PEFT DoRA, bf16, compiled",
    }
    layers, groups = report("layer"), ("forward", "forward+backward")
    shape = {"in": 8192, "out": 8192, "rank": RANK}
    lines = []
    for name, label in ways.items():
        measured = (one(layers, f"layer {group}", label, **shape) for group in groups)
        lines.append([name, *(f"{_time(m):,.0f}" for m in measured)])
    return table(["", *groups], lines)


def model() -> str:
    ways = {
        "LoRA by XLA": f"jax LoRA{WITHOUT_TRITON}",
        "jax_dora, norm kept": f"jax DoRA, norm kept{WITHOUT_TRITON}",
        "torch_dora": "torch torch_dora",
        "PEFT's DoRA, defaults": "torch PEFT DoRA, defaults",
        "PEFT's DoRA, bf16, compiled": "torch PEFT DoRA, bf16, compiled",
    }
    models, lines = report("model"), []
    for name, label in ways.items():
        found = [one(models, f"model {group}", label) for group in ("inference", "gradient")]
        times = (f"{_time(m, clock) / 1e3:,.1f}" for m in found for clock in ("device", "wall"))
        lines.append([name, *times, _gib(found[-1].peak_bytes)])
    header = ("", "inference", "inference, wall", "gradient", "gradient, wall")
    return table([*header, "peak GiB, gradient"], lines)


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
        of_lora = ["", ""] if m.baseline else [_ratio(models, m), _ratio(models, m, "wall")]
        time = f"{_time(m) / 1e3:.1f}"
        lines.append([name, time, *of_lora, _gib(m.peak_bytes), f"`{file}.jsonl`"])
    return table(["", "gradient", "of LoRA's", "wall, of LoRA's", "peak GiB", "from"], lines)


def _gib(size: int | None) -> str:
    return f"{(size or 0) / 2**30:.2f}"


def step() -> str:
    budgets = {
        "all that fits, layers unrolled": "all kept that fits, unrolled",
        "all that fits, layers in a scan": "all kept that fits",
        "12 GiB": "12 GiB",
        "nothing: every layer rematerialised": "every layer rematerialised",
    }
    lines = []
    for name, budget in budgets.items():
        cells = [name]
        for card in ("h100", "h200"):
            found = [rows("step", card, kind=kind, budget=budget) for kind in ("LoRA", "DoRA")]
            if all(found):
                (lora,), (dora,) = found
                cells += [f"{one['tokens_per_s']:,.0f}" for one in (lora, dora)]
                cells.append(f"{dora['over_lora']:.3f}")
            else:
                cells += ["", "", ""]
        lines.append(cells)
    header = [
        f"{card}: {name}" for card in ("H100", "H200") for name in ("LoRA", "DoRA", "its time")
    ]
    return table(["what is kept for the gradient", *header], lines)


def quantised_step() -> str:
    sizes = {"8B": "Llama 3 8B, 1 × 4096", "70B": "Llama 3 70B, 1 × 2048"}
    lines = []
    for found in rows("quantised", "h100", work="step"):
        ms = found["ms"]
        lines.append(
            [
                sizes[found["name"]],
                "LoRA (QLoRA)" if found["kind"] == "LoRA" else "DoRA",
                found["qtype"],
                f"{ms:,.0f}" if ms > 1000 else f"{ms:.1f}",
                f"{found['tokens_per_s']:,.0f}",
                f"{found['peak_bytes'] / 2**30:.1f}",
            ]
        )
    header = ("model's dimensions", "adapter", "base", "ms", "tokens/s", "peak GiB")
    return table(header, lines)


def quantised_norm() -> str:
    qtypes = ("bf16", "int8", "float8_e4m3fn", "nf4", "int4")
    lines = []
    for name, card in (
        ("H100, an earlier kernel", "h100"),
        ("H200 (`h200/quantised.jsonl`)", "h200"),
    ):
        times = {norm["qtype"]: norm["us"] for norm in rows("quantised", card, work="norm")}
        lines.append([name, *(f"{times[qtype]:.1f}" if qtype in times else "" for qtype in qtypes)])
    return table(["", *qtypes], lines)


def quantised_rows() -> str:
    qtypes = ("bf16", "int8", "float8_e4m3fn", "nf4", "int4")
    copy = row("quantised", "h200", work="copy")["tb_per_s"]
    found = rows("quantised", "h200", work="few rows")
    lines = []
    for count in dict.fromkeys(line["rows"] for line in found):
        here = [line for line in found if line["rows"] == count]
        its = {line["qtype"]: line for line in here if "implementation" not in line}
        by_xla = [f"{line['us']:.1f}" for line in here if "implementation" in line]
        cells = [" ".join(by_xla), f"{its['bf16']['us']:.1f}"]
        for ours in (its[qtype] for qtype in qtypes[1:]):
            faster = its["bf16"]["us"] / ours["us"]
            share = 1e-4 * ours["bytes"] / ours["us"] / copy
            cells.append(f"{ours['us']:.1f} ({faster:.2f} ×, {share:.0f} %)")
        lines.append([f"{count}", *cells])
    return table(["rows", "bf16 by XLA", *qtypes], lines)


def quantised_projection() -> str:
    float8 = "float8_e4m3fn"
    columns = {
        "bf16": {"qtype": "bf16"},
        "FP8 weights": {"qtype": float8},
        "FP8 on both sides": {"activations": float8, "in_one_piece": False},
        "the same, each column in one piece": {"activations": float8, "in_one_piece": True},
    }
    lines = []
    for name, kind in (("base alone", "base"), ("DoRA", "DoRA")):
        found = (
            row("quantised_projection", "h200", kind=kind, **{"activations": None} | fields)
            for fields in columns.values()
        )
        lines.append([name, *(f"{line['us']:.0f}" for line in found)])
    return table(["", *columns], lines)


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


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        norm,
        compose,
        layer,
        layer_times,
        model,
        model_later,
        layer_sizes,
        step,
        quantised_step,
        quantised_norm,
        quantised_rows,
        quantised_projection,
        bank_tables.bank_bytes,
        bank_tables.bank_times,
        bank_tables.bank_prompts,
        bank_tables.bank_loads,
        bank_tables.bank_torch,
        bank_tables.bank_straight,
        devices,
        step_parts.step_parts,
        step_parts.step_operators,
        step_parts.step_torch,
        step_parts.fsdp_torch,
    )
}
