"""Tables of numbers on many adapters in one batch, for `quoted` and `measured`."""

from __future__ import annotations

import numpy as np

from benchmarks.bank import Settings
from benchmarks.bank_adapters import EXPONENT
from tools.measurements import grid, row, rows, table

# What a card's link moves, in bytes a second: 16 lanes of PCI Express 5.0.
LINK = 63e9


def bank_bytes() -> str:
    """Returns the bytes of a layer's weights and adapters over those of the weights, expected."""
    settings = Settings()
    sizes = settings.sizes.projections.values()
    weights = 2 * sum(fan_in * out for fan_in, out in sizes)
    rank = sum(settings.ranks) / len(settings.ranks)
    adapter = sum(2 * rank * (fan_in + out) + 4 * out for fan_in, out in sizes)

    def cell(count: int, exponent: float) -> str:
        shares = np.arange(1, settings.slots + 1) ** -exponent
        used = np.sum(1 - (1 - shares / shares.sum()) ** count)
        return f"{1 + used * adapter / weights:.2f}"

    # To so large a power all rows have the first adapter.
    columns = {"one adapter": np.inf, f"Zipf {EXPONENT}": EXPONENT, "evenly": 0.0}
    return grid("rows", {f"{count}": count for count in settings.decoding}, columns, cell)


def bank_times() -> str:
    columns = {
        "one-hot, Zipf 1.5": ("one-hot", "zipf"),
        "XLA's way, Zipf 1.5": ("DoRA", "zipf"),
        "kernels, Zipf 1.5": ("kernel", "zipf"),
        "kernels, evenly": ("kernel", "uniform"),
    }
    lines = {}
    for card in ("h100", "h200"):
        for count in sorted({found["rows"] for found in rows("bank", card, task="decode")}):
            lines[f"{count}"] = rows("bank", card, task="decode", rows=count)
    return grid("rows", lines, columns, _over_base)


def _over_base(found: list[dict], way: tuple[str, str]) -> str:
    [over] = (one["over_base"] for one in found if (one["kind"], one["mix"]) == way)
    return f"{over:.2f}"


def bank_prompts() -> str:
    """Returns the times of prompts over those of the base alone."""

    def cell(mix: str, kind: str) -> str:
        return f"{row('bank', 'h200', task='prefill', kind=kind, mix=mix)['over_base']:.2f}"

    mixes = {f"Zipf {EXPONENT}": "zipf", "evenly": "uniform"}
    return grid("adapters by", mixes, {kind: kind for kind in ("LoRA", "DoRA", "one-hot")}, cell)


def bank_loads() -> str:
    """Returns what of an adapter of a whole model is moved, the least time that this takes, and
    what loading was measured to take."""
    settings = Settings()
    layers, sizes = settings.load_layers, settings.sizes.projections.values()
    lines = []
    for rank in settings.ranks:
        moved = layers * sum(2 * rank * (fan_in + out) + 4 * out for fan_in, out in sizes)
        found = rows("bank_straight", "h200", task="load", layers=layers, rank=rank)
        times = {line["kind"]: f"{line['ms']:.1f}" for line in found}
        cells = [f"{rank}", f"{moved / 1e6:.0f}", f"{1e3 * moved / LINK:.1f}"]
        lines.append([*cells, times["first"], times["again"]])
    return table(["rank", "MB", "by PCIe 5, ms", "first, ms", "again, ms"], lines)


def bank_torch() -> str:
    """Returns times of torch_dora's bank and of PEFT's mixed batches over those of the base."""
    columns = {
        "DoRA, Zipf 1.5": ("DoRA", "zipf"),
        "DoRA, evenly": ("DoRA", "uniform"),
        "LoRA, Zipf 1.5": ("LoRA", "zipf"),
        "PEFT's LoRA, Zipf 1.5": ("PEFT LoRA", "zipf"),
    }
    measured = rows("bank_torch", "h200")
    lines = {
        f"{count} × {tokens}": rows("bank_torch", "h200", rows=count, tokens=tokens)
        for tokens, count in sorted({(line["tokens"], line["rows"]) for line in measured})
    }
    return grid("rows × tokens", lines, columns, _over_base)


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


def every_bank(card: str) -> str:
    """Returns a line for each batch that was measured on a card."""
    header = ("task", "rows", "tokens", "mix", "distinct", "kind")
    numbers = {"bound": "least over base, by bytes", "ms": "ms a layer"}
    numbers |= {"over_base": "over base", "over_lora": "over LoRA"}
    lines = (
        [*(str(line[name]) for name in header), *(f"{line[name]:.3f}" for name in numbers)]
        for line in rows("bank", card)
        if line["task"] != "load" and "ms" in line
    )
    return table((*header, *numbers.values()), lines)
