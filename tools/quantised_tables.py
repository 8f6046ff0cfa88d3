"""Tables of numbers on quantised bases, for `quoted`."""

from __future__ import annotations

from typing import Any

from tools.measurements import grid, row, rows, table

QTYPES = ("bf16", "int8", "float8_e4m3fn", "nf4", "int4")


def quantised_step() -> str:
    sizes = {"8B": "Llama 3 8B, 1 × 4096", "70B": "Llama 3 70B, 1 × 2048"}
    lines = []
    for found in rows("quantised", "h100", work="step"):
        ms = found["ms"]
        kept = ", inner kept" if "keep_inner" in found else ""
        cells = [sizes[found["name"]], "LoRA (QLoRA)" if found["kind"] == "LoRA" else f"DoRA{kept}"]
        cells += [found["qtype"], f"{ms:,.0f}" if ms > 1000 else f"{ms:.1f}"]
        cells += [f"{found['tokens_per_s']:,.0f}", f"{found['peak_bytes'] / 2**30:.1f}"]
        lines.append(cells)
    header = ("model's dimensions", "adapter", "base", "ms", "tokens/s", "peak GiB")
    return table(header, lines)


def quantised_norm() -> str:
    cards = {"H100, an earlier kernel": "h100", "H200 (`h200/quantised.jsonl`)": "h200"}

    def cell(card: str, qtype: str) -> str:
        found = rows("quantised", card, work="norm", qtype=qtype)
        return f"{found[0]['us']:.1f}" if found else ""

    return grid("", cards, {qtype: qtype for qtype in QTYPES}, cell)


def quantised_rows() -> str:
    copy = row("quantised", "h200", work="copy")["tb_per_s"]
    found = rows("quantised", "h200", work="few rows")
    lines = []
    for count in dict.fromkeys(line["rows"] for line in found):
        here = [line for line in found if line["rows"] == count]
        its = {line["qtype"]: line for line in here if "implementation" not in line}
        by_xla = [f"{line['us']:.1f}" for line in here if "implementation" in line]
        cells = [" ".join(by_xla), f"{its['bf16']['us']:.1f}"]
        for ours in (its[qtype] for qtype in QTYPES[1:]):
            faster = its["bf16"]["us"] / ours["us"]
            share = 1e-4 * ours["bytes"] / ours["us"] / copy
            cells.append(f"{ours['us']:.1f} ({faster:.2f} ×, {share:.0f} %)")
        lines.append([f"{count}", *cells])
    return table(["rows", "bf16 by XLA", *QTYPES], lines)


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
