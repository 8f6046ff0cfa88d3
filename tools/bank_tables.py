"""Tables of numbers on many adapters in one batch, for `quoted`."""

from __future__ import annotations

import numpy as np

from benchmarks.bank import Settings
from benchmarks.bank_adapters import EXPONENT
from tools.measurements import row, rows, table

# What a card's link moves, in bytes a second: 16 lanes of PCI Express 5.0.
LINK = 63e9


def bank_bytes() -> str:
    """Returns the bytes of a layer's weights and adapters over those of the weights, expected."""
    settings = Settings()
    sizes = settings.sizes.projections.values()
    weights = 2 * sum(fan_in * out for fan_in, out in sizes)
    rank = sum(settings.ranks) / len(settings.ranks)
    adapter = sum(2 * rank * (fan_in + out) + 4 * out for fan_in, out in sizes)
    lines = []
    for count in settings.decoding:
        cells = [f"{count}", f"{1 + adapter / weights:.2f}"]
        for exponent in (EXPONENT, 0.0):
            shares = np.arange(1, settings.slots + 1) ** -exponent
            used = np.sum(1 - (1 - shares / shares.sum()) ** count)
            cells.append(f"{1 + used * adapter / weights:.2f}")
        lines.append(cells)
    return table(["rows", "one adapter", f"Zipf {EXPONENT}", "evenly"], lines)


def bank_times() -> str:
    columns = (("one-hot", "zipf"), ("DoRA", "zipf"), ("kernel", "zipf"), ("kernel", "uniform"))
    lines = []
    for card in ("h100", "h200"):
        decoding = rows("bank", card, task="decode")
        for count in sorted({found["rows"] for found in decoding}):
            at = {
                (found["kind"], found["mix"]): found for found in decoding if found["rows"] == count
            }
            lines.append([f"{count}", *(f"{at[key]['over_base']:.2f}" for key in columns)])
    names = ("one-hot, Zipf 1.5", "XLA's way, Zipf 1.5", "kernels, Zipf 1.5", "kernels, evenly")
    return table(["rows", *names], lines)


def bank_prompts() -> str:
    """Returns the times of prompts over those of the base alone."""
    kinds = ("LoRA", "DoRA", "one-hot")
    mixes = {"zipf": f"Zipf {EXPONENT}", "uniform": "evenly"}
    lines = []
    for mix, name in mixes.items():
        found = (row("bank", "h200", task="prefill", kind=kind, mix=mix) for kind in kinds)
        lines.append([name, *(f"{line['over_base']:.2f}" for line in found)])
    return table(["adapters by", *kinds], lines)


def bank_loads() -> str:
    """Returns what of an adapter of a whole model is moved, the least time that this takes, and
    what loading was measured to take, where it was."""
    settings = Settings()
    layers, sizes = settings.load_layers, settings.sizes.projections.values()
    measured = {
        (line["rank"], line["kind"]): f"{line['ms']:.1f}"
        for line in rows("bank_straight", "h200", task="load", layers=layers)
    }
    kinds = [kind for kind in ("first", "again") if any(kind in key for key in measured)]
    lines = []
    for rank in settings.ranks:
        moved = layers * sum(2 * rank * (fan_in + out) + 4 * out for fan_in, out in sizes)
        cells = [f"{rank}", f"{moved / 1e6:.0f}", f"{1e3 * moved / LINK:.1f}"]
        lines.append([*cells, *(measured[rank, kind] for kind in kinds)])
    return table(["rank", "MB", "by PCIe 5, ms", *(f"{kind}, ms" for kind in kinds)], lines)


def bank_torch() -> str:
    """Returns times of torch_dora's bank and of PEFT's mixed batches over those of the base."""
    measured = {
        (line["rows"], line["tokens"], line["mix"], line["kind"]): line["over_base"]
        for line in rows("bank_torch", "h200")
    }
    lines = []
    for batch in sorted({key[:2] for key in measured}, key=lambda key: (key[1], key[0])):
        cells = [f"{batch[0]} × {batch[1]}"]
        for mix, kind in (("zipf", "DoRA"), ("uniform", "DoRA"), ("zipf", "LoRA")):
            cells.append(f"{measured[*batch, mix, kind]:.2f}")
        lines.append([*cells, f"{measured[*batch, 'zipf', 'PEFT LoRA']:.2f}"])
    names = ("DoRA, Zipf 1.5", "DoRA, evenly", "LoRA, Zipf 1.5", "PEFT's LoRA, Zipf 1.5")
    return table(["rows × tokens", *names], lines)


def bank_straight() -> str:
    """Returns times of a program without a loop over those of the base alone."""
    lines = []
    for count in sorted({line["rows"] for line in rows("bank_straight", "h200", task="decode")}):
        kinds = {
            line["kind"]: line
            for line in rows("bank_straight", "h200", task="decode", rows=count, mix="zipf")
        }
        cells = [f"{count}", f"{1e3 * kinds['base']['ms']:.0f}", f"{kinds['DoRA']['bound']:.2f}"]
        over = (f"{kinds[kind]['over_base']:.2f}" for kind in ("DoRA", "one-hot"))
        lines.append([*cells, *over])
    return table(["rows", "base, µs a layer", "least, by bytes", "DoRA", "one-hot"], lines)
