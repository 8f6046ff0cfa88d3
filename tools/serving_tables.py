"""The tables of docs/serving.md: many adapters in one batch, from the committed results."""

from __future__ import annotations

from typing import Any

from benchmarks.bank import Settings
from benchmarks.bank_adapters import EXPONENT
from benchmarks.results import Row, row, rows
from tools.markdown import grid, table

LINK = 63e9  # bytes a second of 16 lanes of PCI Express 5.0
SMALL_BLOCKS = "decoding with a bank, smaller thread blocks"
MIXES = {f"Zipf {EXPONENT}": "zipf", "evenly": "uniform", "one adapter": "one"}


def bank_decoding() -> str:
    """Returns the bytes and the times of rows of one token, relative to the base's."""
    reading = {
        (line["rows"], line["mix"]): line["over_base"]
        # The last of several runs counts.
        for line in rows("tried", "h100", what=SMALL_BLOCKS, variant="only reads A and B")
    }

    def cells(count: int, name: str) -> list[str]:
        mix = MIXES[name]
        base, dora, one_hot = (
            row("bank", "h100", rows=count, tokens=1, mix=mix, kind=kind, rank=None)
            for kind in ("base", "DoRA", "one-hot")
        )
        only = reading.get((count, mix))
        numbers = [dora["bytes_over_base"], only, dora["over_base"], dora["over_lora"]]
        numbers.append(one_hot["over_base"])
        found = [f"{number:.2f}" if number else "–" for number in numbers]
        return [f"{count}", name, f"{1e3 * base['ms']:.0f}", *found]

    counts = sorted({line["rows"] for line in rows("bank", "h100", task="decode")})
    ratios = "bytes", "only reading", "DoRA", "over LoRA", "one-hot"
    names = "rows", "adapters by", "base, µs", *ratios
    return table(names, (cells(count, name) for count in counts for name in MIXES))


def bank_growth() -> str:
    """Returns the times of 64 rows by the rank of all adapters, and by their number."""
    grown = rows("bank", "h100", mix="growth")
    ranks = sorted({line["rank"] for line in grown if "rank" in line})
    counts = sorted({line["adapters"] for line in grown if "adapters" in line})
    lines = {f"64 adapters of rank {rank}": {"rank": rank} for rank in ranks}
    lines |= {f"{count:,} adapters": {"adapters": count} for count in counts}

    def cell(fields: dict[str, int], kind: str) -> str:
        line = row("bank", "h100", mix="growth", kind=kind, **fields)
        loads = f", {line['loads']} loads" if line.get("loads") else ""
        return f"{1e3 * line['ms']:.0f}{loads}"

    kinds = {f"{kind}, µs": kind for kind in ("base", "LoRA", "DoRA")}
    return grid("asked for", lines, kinds, cell)


def bank_served() -> str:
    """Returns the tokens per second that the server's engine answers with, and the time to the
    first token, over a bf16 and an nf4 base."""
    columns = {
        "LoRA, tokens/s": ("LoRA", "tokens_per_s", ",.0f"),
        "LoRA, of the base's": ("LoRA", "of_base", ".2f"),
        "DoRA, tokens/s": ("DoRA", "tokens_per_s", ",.0f"),
        "DoRA, of the base's": ("DoRA", "of_base", ".2f"),
        "first token, ms": ("DoRA", "first_token_ms", ".1f"),
        "first token, 90th percentile": ("DoRA", "first_token_p90_ms", ".1f"),
    }

    def cell(line: tuple[str, int], column: tuple[str, str, str]) -> str:
        (qtype, count), (kind, field, form) = line, column
        if count == 0:
            kind = "base" if kind == "DoRA" else kind
        found = rows("serve", "h100", kind=kind, adapters=count, qtype=qtype)
        return format(found[0][field], form) if found and field in found[0] else "–"

    lines = {
        f"{qtype}, {count or 'none'}": (qtype, count)
        for qtype in ("bf16", "nf4")
        for count in dict.fromkeys(line["adapters"] for line in rows("serve", "h100", qtype=qtype))
    }
    return grid("base, adapters", lines, columns, cell)


def served_beside() -> str:
    """Returns the tokens per second of the server's engine and of transformers' `generate`."""
    servers = {
        "`jax-dora serve`, DoRA": ("serve", "DoRA"),
        "transformers, torch_dora's bank of DoRA": ("serve_torch", "torch_dora DoRA"),
        "transformers, PEFT's LoRA by `adapter_names`": ("serve_torch", "PEFT LoRA"),
        "transformers, PEFT's DoRA, adapter by adapter": ("serve_torch", "PEFT DoRA"),
    }
    bases = {"serve": "base", "serve_torch": "transformers"}

    def cell(server: tuple[str, str], adapters: int) -> str:
        file, kind = server
        fields = {"kind": kind if adapters else bases[file], "adapters": adapters}
        if file == "serve":
            fields["qtype"] = "bf16"
        found = rows(file, "h100", **fields)
        return f"{found[0]['tokens_per_s']:,.0f}" if found else "–"

    counts = {"base, tokens/s": 0, "1 adapter": 1, "8 adapters": 8, "64 adapters": 64}
    return grid("by", servers, counts, cell)


def bank_prompts() -> str:
    """Returns the times of prompts divided by those of the base."""

    def cell(prompts: tuple[int, int, str], kind: str) -> str:
        count, tokens, mix = prompts
        of = {"task": "prefill", "rows": count, "tokens": tokens, "mix": mix}
        return f"{row('bank', 'h100', **of, kind=kind)['over_base']:.2f}"

    lines = {
        f"{count} of {tokens}, {name}": (count, tokens, mix)
        for count, tokens in ((8, 512), (4, 64))
        for name, mix in MIXES.items()
    } | {"1 of 256": (1, 256, "one")}
    kinds = {kind: kind for kind in ("LoRA", "DoRA", "one-hot")} | {"one by one": "loop"}
    return grid("prompts of tokens", lines, kinds, cell)


def bank_loads() -> str:
    """Returns the size of a whole model's adapter, the least time to move it, and the measured
    time of loading it."""
    settings = Settings()
    layers, sizes = settings.load_layers, settings.sizes.projections().values()
    lines = []
    for rank in settings.ranks:
        moved = layers * sum(2 * rank * (n_in + n_out) + 4 * n_out for n_in, n_out in sizes)
        found = rows("bank", "h100", task="load", layers=layers, rank=rank)
        times = {line["kind"]: f"{line['ms']:.1f}" for line in found}
        cells = [f"{rank}", f"{moved / 1e6:.0f}", f"{1e3 * moved / LINK:.1f}"]
        lines.append([*cells, times["first"], times["again"]])
    return table(["rank", "MB", "by PCIe 5, ms", "first, ms", "again, ms"], lines)


def bank_torch() -> str:
    """Returns the times of torch_dora's bank and of PEFT's mixed batches, divided by the base's."""
    columns = {
        "DoRA, Zipf 1.5": ("DoRA", "zipf"),
        "DoRA, evenly": ("DoRA", "uniform"),
        "LoRA, Zipf 1.5": ("LoRA", "zipf"),
        "LoRA, evenly": ("LoRA", "uniform"),
        "PEFT's LoRA, Zipf 1.5": ("PEFT LoRA", "zipf"),
    }
    shapes = sorted({(line["tokens"], line["rows"]) for line in rows("bank_torch", "h100")})
    lines = {f"{count} × {tokens}": {"rows": count, "tokens": tokens} for tokens, count in shapes}

    def cell(shape: dict[str, Any], column: tuple[str, str]) -> str:
        kind, mix = column
        return f"{row('bank_torch', 'h100', kind=kind, mix=mix, **shape)['over_base']:.2f}"

    return grid("rows × tokens", lines, columns, cell)


def every_bank() -> str:
    """Returns a line for each batch of the level `bank`."""
    facts = ("task", "rows", "tokens", "mix", "distinct", "kind")
    numbers = {"bytes_over_base": "bytes over base", "ms": "ms a layer"}
    numbers |= {"over_base": "over base", "over_lora": "over LoRA"}

    def cells(line: Row) -> list[str]:
        values = [f"{line[name]:.3f}" if name in line else "–" for name in numbers]
        return [*(str(line[name]) for name in facts), *values]

    lines = [line for line in rows("bank", "h100") if line["task"] != "load" and "ms" in line]
    return table((*facts, *numbers.values()), map(cells, lines))
