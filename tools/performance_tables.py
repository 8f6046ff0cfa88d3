"""The tables of README and docs/performance.md, from the committed results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.model.protocol import BEST_LORA
from benchmarks.report import Report, time
from benchmarks.report import name as work_name
from benchmarks.results import Row, row, rows
from tools.markdown import gib, grid, table

ROOT = Path(__file__).parents[1]
RANK = 384
NO_TRITON = " (no Triton)"
PEFT_VARIANTS = {
    "torch_dora": "torch torch_dora",
    "PEFT's DoRA, defaults": "torch PEFT DoRA, defaults",
    "PEFT's DoRA, bf16, compiled": "torch PEFT DoRA, bf16, compiled",
}
QTYPES = ("bf16", "int8", "float8_e4m3fn", "nf4", "int4")


def reports() -> dict[str, Report]:
    """Returns the reports of operators, layers and models by their path in the checkout."""
    return {
        path.relative_to(ROOT).as_posix(): Report.read(path)
        for path in sorted((ROOT / "benchmarks/results/h200").glob("*.jsonl"))
        if results.read(path)[0]["kind"] == "benchmark"
    }


def headline() -> str:
    """Returns README's tables: parity, and the time of DoRA in JAX divided by that of LoRA."""
    agreement = []
    for path in sorted((ROOT / "parity/reports/cuda").glob("*.jsonl")):
        header, lines = results.read(path)
        judged = [line["ok"] for line in lines if line.get("ok") is not None]
        good = sum(all(ok) if isinstance(ok, list) else ok for ok in judged)
        card = header["environment"]["card"]
        agreement.append((header["level"], card, f"{good} of {len(judged)}", _link(path)))
    variants = {
        f"DoRA{NO_TRITON}": "norm in every call",
        f"DoRA, norm kept{NO_TRITON}": "norm kept",
        f"DoRA, norm and inner kept{NO_TRITON}": "norm and inner kept",
    }
    ratios: dict[str, dict[str, list[float]]] = {}
    sources: dict[str, dict[str, None]] = {}
    for path, report in reports().items():
        for m in report.rows:
            variant, ratio = m["variant"], report.ratio(m, baseline=BEST_LORA)
            if m["framework"] == "jax" and variant in variants and ratio:
                if m["shape"]["rank"] == RANK:
                    ratios.setdefault(work_name(m), {}).setdefault(variant, []).append(ratio)
                    sources.setdefault(work_name(m), {})[_link(ROOT / path)] = None
    lines = (
        (work, *(_range(by_variant.get(one, [])) for one in variants), ", ".join(sources[work]))
        for work, by_variant in ratios.items()
    )
    parts = [
        table(("comparison", "card", "within tolerance", "from"), agreement),
        "Device time of DoRA over that of the best plain LoRA that XLA gives in the same run; of "
        "several runs, the least and the most:",
        table(("work", *variants.values(), "from"), lines),
        "More in [`docs/performance.md`](docs/performance.md).",
    ]
    return "\n\n".join(parts)


def _link(path: Path) -> str:
    return f"[`{path.name}`]({path.relative_to(ROOT).as_posix()})"


def _range(ratios: Sequence[float]) -> str:
    ends = [f"{end:.2f}×" for end in sorted({min(ratios), max(ratios)})] if ratios else ["–"]
    return " to ".join(dict.fromkeys(ends))


def _us(measurement: Row, clock: str = "device") -> float:
    """Returns microseconds, or NaN if there are none or the result is wrong."""
    return time(measurement, clock) or math.nan


def _text(measurement: Row, digits: int = 1) -> str:
    return f"{_us(measurement):,.{digits}f}"


def _ratio(report: Report, measurement: Row, clock: str = "device") -> str:
    return f"{report.ratio(measurement, clock, BEST_LORA):.2f}"


def _sizes(axes: str, *shapes: tuple[int, int]) -> dict[str, dict[str, int]]:
    names = axes.split(" × ")
    return {" × ".join(map(str, shape)): dict(zip(names, shape, strict=True)) for shape in shapes}


def norm() -> str:
    variants = {
        "jax_dora": "jax mosaic",
        "XLA, factored": "jax factored",
        "XLA, dense": "jax dense",
        "torch_dora": "torch triton",
        "PEFT": "torch PEFT",
        "the paper's way": "torch the paper's",
    }
    sizes = _sizes("in × out", (4096, 4096), (8192, 8192), (8192, 28672), (28672, 8192))
    ops = Report.committed("ops_norm")

    def cell(shape: dict[str, int], label: str) -> str:
        return _text(ops.row("norm", label, **shape, rank=RANK))

    return grid("in × out", sizes, variants, cell)


def compose() -> str:
    columns = {
        "forward: XLA": ("compose", "jax xla"),
        "forward: Mosaic": ("compose", "jax mosaic"),
        "backward: XLA": ("backward, d_base", "jax xla"),
        "backward: Mosaic": ("backward, d_base", "jax mosaic"),
        "backward: Triton": ("backward, d_base", "torch triton"),
    }
    sizes = _sizes("rows × out", (2048, 2048), (4096, 4096), (4096, 8192), (4096, 28672))
    ops = Report.committed("ops")
    return grid("rows × out", sizes, columns, lambda shape, one: _text(ops.row(*one, **shape)))


def layer() -> str:
    columns = {
        f"{group}{kept}": (f"layer {group}", f"jax DoRA{kept}{NO_TRITON}")
        for group in ("forward", "forward+backward")
        for kept in ("", ", norm kept")
    }
    sizes = _sizes("in × out", (8192, 8192), (4096, 4096), (4096, 14336))
    layers = Report.committed("layer")

    def cell(shape: dict[str, int], column: tuple[str, str]) -> str:
        return _ratio(layers, layers.row(*column, **shape, rank=RANK))

    return grid("in × out", sizes, columns, cell)


def layer_times() -> str:
    variants = {
        "jax_dora": f"jax DoRA{NO_TRITON}",
        "jax_dora, norm kept": f"jax DoRA, norm kept{NO_TRITON}",
        "LoRA by XLA": f"jax LoRA{NO_TRITON}",
        "DoRA by XLA": f"jax XLA DoRA{NO_TRITON}",
        **PEFT_VARIANTS,
    }
    groups = {group: f"layer {group}" for group in ("forward", "forward+backward")}
    layers, shape = Report.committed("layer"), {"in": 8192, "out": 8192, "rank": RANK}

    def cell(label: str, group: str) -> str:
        return _text(layers.row(group, label, **shape), digits=0)

    return grid("", variants, groups, cell)


def model() -> str:
    variants = {
        "LoRA by XLA": f"jax LoRA{NO_TRITON}",
        "jax_dora, norm kept": f"jax DoRA, norm kept{NO_TRITON}",
        **PEFT_VARIANTS,
    }
    columns = {
        f"{task}{suffix}": (task, clock)
        for task in ("inference", "gradient")
        for suffix, clock in (("", "device"), (", wall", "wall"))
    }
    models = Report.committed("model")

    def cell(label: str, column: tuple[str, str]) -> str:
        task, clock = column
        m = models.row(f"model {task}", label)
        return gib(m["peak_bytes"], 2) if clock == "peak" else f"{_us(m, clock) / 1e3:,.1f}"

    return grid("", variants, columns | {"peak GiB, gradient": ("gradient", "peak")}, cell)


def model_later() -> str:
    gradient, every_call = "model_gradient", "model_norm_every_call"
    variants = {
        "LoRA by XLA": (gradient, "LoRA"),
        "norm kept": (gradient, "DoRA, norm kept"),
        "norm and inner kept": (gradient, "DoRA, norm and inner kept"),
        "norm in every call": (every_call, "DoRA"),
    }
    lines = []
    for name, (file, variant) in variants.items():
        models = Report.committed(file)
        m = models.row("model gradient", f"jax {variant}{NO_TRITON}")
        ratios = ["", ""] if "baseline" in m else [_ratio(models, m), _ratio(models, m, "wall")]
        ms, peak = f"{_us(m) / 1e3:.1f}", gib(m["peak_bytes"], 2)
        lines.append([name, ms, *ratios, peak, f"`{file}.jsonl`"])
    return table(["", "gradient", "of LoRA's", "wall, of LoRA's", "peak GiB", "from"], lines)


def layer_sizes() -> str:
    tasks = {"decode": "a frozen layer's call", "gradient": "forward and backward"}
    lines = []
    for dora in rows("sizes", "h200", kind="DoRA"):
        same = {key: dora[key] for key in ("task", "rows", "fan_in", "out", "rank")}
        lora = row("sizes", "h200", kind="LoRA", **same)
        size = f"{dora['rows']:,} × {dora['fan_in']} × {dora['out']}"
        times = (f"{line['us']:.1f}" for line in (lora, dora))
        cells = [tasks[dora["task"]], size, str(dora["rank"]), *times]
        lines.append([*cells, f"{dora['over_lora']:.3f}"])
    return table(["", "rows × in × out", "rank", "LoRA, µs", "DoRA, µs", "ratio"], lines)


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


def quantised_step() -> str:
    sizes = {"8B": "Llama 3 8B, 1 × 4096", "70B": "Llama 3 70B, 1 × 2048"}
    lines = []
    for step in rows("quantised", "h100", work="step"):
        kept = ", inner kept" if "keep_inner" in step else ""
        adapter = "LoRA (QLoRA)" if step["kind"] == "LoRA" else f"DoRA{kept}"
        ms = f"{step['ms']:,.0f}" if step["ms"] > 1000 else f"{step['ms']:.1f}"
        cells = [sizes[step["name"]], adapter, step["qtype"], ms, f"{step['tokens_per_s']:,.0f}"]
        lines.append([*cells, gib(step["peak_bytes"])])
    header = ("model's dimensions", "adapter", "base", "ms", "tokens/s", "peak GiB")
    return table(header, lines)


def quantised_norm() -> str:
    cards = {f"{card.upper()} (`{card}/quantised.jsonl`)": card for card in ("h100", "h200")}

    def cell(card: str, qtype: str) -> str:
        found = rows("quantised", card, work="norm", qtype=qtype)
        return f"{found[0]['us']:.1f}" if found else ""

    return grid("", cards, {qtype: qtype for qtype in QTYPES}, cell)


def quantised_rows() -> str:
    lines = []
    for card in ("h100", "h200"):
        copy_rate = row("quantised", card, work="copy")["tb_per_s"]
        measured = rows("quantised", card, work="few rows")
        for count in dict.fromkeys(line["rows"] for line in measured):
            some = [line for line in measured if line["rows"] == count]
            ours = {line["qtype"]: line for line in some if "implementation" not in line}
            (xla,) = (line["us"] for line in some if "implementation" in line)
            cells = [card.upper(), f"{count}", f"{xla:.1f}", f"{ours['bf16']['us']:.1f}"]
            for line in (ours[qtype] for qtype in QTYPES[1:]):
                share = 1e-4 * line["bytes"] / line["us"] / copy_rate
                cells.append(f"{line['us']:.1f} ({xla / line['us']:.2f} ×, {share:.0f} %)")
            lines.append(cells)
    return table(["card", "rows", "bf16 by XLA", *QTYPES], lines)


def quantised_products() -> str:
    lines = []
    measured = rows("quantised", "h100", work="product")
    for count in dict.fromkeys(line["rows"] for line in measured):
        us = {
            (line["qtype"], "implementation" in line): line["us"]
            for line in measured
            if line["rows"] == count
        }
        cells = [f"{count:,}", f"{us['bf16', True]:.1f}"]
        cells += [f"{us[q, False]:.1f} ({us[q, True]:.1f})" for q in QTYPES[1:]]
        lines.append(cells)
    return table(["rows", *QTYPES], lines)


def quantised_decode() -> str:
    lines = []
    for card in ("h100", "h200"):
        measured = rows("quantised", card, work="decode")
        for count in dict.fromkeys(line["rows"] for line in measured):
            cells = [card.upper(), f"{count}"]
            for kind in ("base", "DoRA"):
                some = [line for line in measured if (line["rows"], line["kind"]) == (count, kind)]
                us = {line["qtype"]: 1e3 * line["ms"] for line in some}
                cells.append(f"{us['bf16']:.0f}")
                for qtype in ("int8", "nf4"):
                    time, speed = us.get(qtype, 0), us["bf16"] / us.get(qtype, 1)
                    cells.append(f"{time:.0f} ({speed:.2f} ×)" if time else "")
            lines.append(cells)
    kinds = [f"{kind}, {qtype}" for kind in ("base", "bank") for qtype in ("bf16", "int8", "nf4")]
    return table(["card", "rows", *kinds], lines)


def quantised_projection() -> str:
    float8 = "float8_e4m3fn"
    columns: dict[str, dict[str, Any]] = {
        "bf16": {"qtype": "bf16"},
        "FP8 weights": {"qtype": float8},
        "FP8 on both sides": {"activations": float8, "in_one_piece": False},
        "the same, each column in one piece": {"activations": float8, "in_one_piece": True},
    }

    def cell(kind: str, fields: dict[str, Any]) -> str:
        fields = {"work": "projection", "kind": kind, "activations": None} | fields
        return f"{row('quantised', 'h200', **fields)['us']:.0f}"

    return grid("", {"base alone": "base", "DoRA": "DoRA"}, columns, cell)
