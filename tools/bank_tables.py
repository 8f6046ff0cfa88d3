"""Tables of numbers on many adapters in one batch, for `quoted` and `measured`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.bank import Settings
from benchmarks.bank_adapters import EXPONENT
from tools.measurements import grid, row, rows, table

# What a card's link moves, in bytes a second: 16 lanes of PCI Express 5.0.
LINK = 63e9


def bank_bytes() -> str:
    """Returns the bytes of a layer's weights and adapters over those of the weights, expected."""
    settings = Settings()
    sizes = settings.sizes.projections().values()
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


def bank_decoding() -> str:
    """Returns the times of rows of one token over those of the base alone, and of LoRA."""

    def number(mix: str, kind: str, name: str) -> Callable[[int], str]:
        return lambda count: _number(name, rows=count, tokens=1, mix=mix, kind=kind)

    columns = {
        "base, µs": number("zipf", "base", "ms"),
        "least": number("zipf", "DoRA", "bound"),
        "DoRA": number("zipf", "DoRA", "over_base"),
        "over LoRA": number("zipf", "DoRA", "over_lora"),
        "one-hot": number("zipf", "one-hot", "over_base"),
        "least, evenly": number("uniform", "DoRA", "bound"),
        "DoRA, evenly": number("uniform", "DoRA", "over_base"),
        "over LoRA, evenly": number("uniform", "DoRA", "over_lora"),
    }
    counts = sorted({found["rows"] for found in rows("bank", "h100", task="decode")})
    lines = {f"{count}": count for count in counts}
    return grid("rows", lines, columns, lambda count, told: told(count))


def _number(name: str, **fields: Any) -> str:
    """Returns a number of the one batch that was measured so, a time in µs, or a dash."""
    for found in rows("bank", "h100", **fields):
        if name not in found:
            break
        return f"{1e3 * found[name]:.0f}" if name == "ms" else f"{found[name]:.2f}"
    return "–"


def bank_growth() -> str:
    """Returns the times of 64 rows by the rank of all adapters, and by how many are asked for."""
    grown = rows("bank", "h100", mix="growth")
    ranks = sorted({line["rank"] for line in grown if "rank" in line})
    counts = sorted({line["adapters"] for line in grown if "adapters" in line})
    lines = {f"64 adapters of rank {rank}": {"rank": rank} for rank in ranks}
    lines |= {f"{count:,} adapters": {"adapters": count} for count in counts}

    def cell(line: dict[str, int], kind: str) -> str:
        [found] = rows("bank", "h100", mix="growth", kind=kind, **line)
        loads = f", {found['loads']} loads" if found.get("loads") else ""
        return f"{1e3 * found['ms']:.0f}{loads}"

    kinds = {f"{kind}, µs": kind for kind in ("base", "LoRA", "DoRA")}
    return grid("asked for", lines, kinds, cell)


def bank_served() -> str:
    """Returns the tokens a second that the server's engine answers with."""
    base = row("serve", "h100", kind="base")["tokens_per_s"]

    def cell(count: int, column: tuple[str, str]) -> str:
        kind, name = column
        value = row("serve", "h100", kind=kind, adapters=count)[name]
        return f"{value:,.0f}" if name == "tokens_per_s" else f"{value:.2f}"

    columns = {
        f"{kind}, {told}": (kind, name)
        for kind in ("LoRA", "DoRA")
        for told, name in (("tokens/s", "tokens_per_s"), ("of the base's", "of_base"))
    }
    counts = {
        f"{line['adapters']}": line["adapters"] for line in rows("serve", "h100", kind="DoRA")
    }
    return grid(f"adapters (base: {base:,.0f} tokens/s)", counts, columns, cell)


def served_beside() -> str:
    """Returns the tokens a second of the server's engine and of transformers' `generate`."""
    ways = {
        "`jax-dora serve`, DoRA": ("serve", "DoRA"),
        "transformers, torch_dora's bank of DoRA": ("serve_torch", "torch_dora DoRA"),
        "transformers, PEFT's LoRA by `adapter_names`": ("serve_torch", "PEFT LoRA"),
        "transformers, PEFT's DoRA, adapter by adapter": ("serve_torch", "PEFT DoRA"),
    }
    alone = {"serve": "base", "serve_torch": "transformers"}

    def cell(way: tuple[str, str], adapters: int) -> str:
        file, kind = way
        found = rows(file, "h100", kind=kind if adapters else alone[file], adapters=adapters)
        return f"{found[0]['tokens_per_s']:,.0f}" if found else "–"

    counts = {"base, tokens/s": 0, "1 adapter": 1, "8 adapters": 8, "64 adapters": 64}
    return grid("by", ways, counts, cell)


def bank_prompts() -> str:
    """Returns the times of prompts over those of the base alone."""

    def cell(mix: str, kind: str) -> str:
        return f"{row('bank', 'h100', task='prefill', kind=kind, mix=mix)['over_base']:.2f}"

    mixes = {f"Zipf {EXPONENT}": "zipf", "evenly": "uniform"}
    return grid("adapters by", mixes, {kind: kind for kind in ("LoRA", "DoRA", "one-hot")}, cell)


def bank_loads() -> str:
    """Returns what of an adapter of a whole model is moved, the least time that this takes, and
    what loading was measured to take."""
    settings = Settings()
    layers, sizes = settings.load_layers, settings.sizes.projections().values()
    lines = []
    for rank in settings.ranks:
        moved = layers * sum(2 * rank * (fan_in + out) + 4 * out for fan_in, out in sizes)
        found = rows("bank", "h100", task="load", layers=layers, rank=rank)
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


def _over_base(found: list[dict], way: tuple[str, str]) -> str:
    [over] = (one["over_base"] for one in found if (one["kind"], one["mix"]) == way)
    return f"{over:.2f}"


def every_bank() -> str:
    """Returns a line for each batch that was measured."""
    header = ("task", "rows", "tokens", "mix", "distinct", "kind")
    numbers = {"bound": "least over base, by bytes", "ms": "ms a layer"}
    numbers |= {"over_base": "over base", "over_lora": "over LoRA"}
    lines = (
        [
            *(str(line[name]) for name in header),
            *(f"{line[name]:.3f}" if name in line else "–" for name in numbers),
        ]
        for line in rows("bank", "h100")
        if line["task"] != "load" and "ms" in line
    )
    return table((*header, *numbers.values()), lines)
