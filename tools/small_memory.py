"""Writes the tables in docs/small-memory.md: of memory, computed from shapes alone, and of what
formats cost, from `benchmarks/results/cpu/quality.jsonl`.

python tools/small_memory.py
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flax import nnx

import jax_dora
from benchmarks import results
from jax_dora.finetune import estimate
from jax_dora.models import CausalLM, DecoderConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "small-memory.md"
BEGIN, END = "<!-- computed: begin (tools/small_memory.py) -->", "<!-- computed: end -->"
MEASURED = ROOT / "benchmarks" / "results" / "cpu" / "quality.jsonl"
QUALITY = (
    "<!-- measured: begin (benchmarks/results/cpu/quality.jsonl) -->",
    "<!-- measured: end -->",
)
RANK, TOKENS = 16, 4096
FORMATS = (None, "int8", "float8_e4m3fn", "nf4")


def _config(hidden: int, intermediate: int, layers: int, heads: int, vocab: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        attention="cudnn",
    )


MODELS = {
    "Llama 3 8B": _config(4096, 14_336, 32, 32, 128_256),
    "Qwen3 14B": _config(5120, 17_408, 40, 40, 151_936),
    "Qwen3 32B": _config(5120, 25_600, 64, 64, 151_936),
    "Llama 3 70B": _config(8192, 28_672, 80, 64, 128_256),
}


def table() -> str:
    """Returns the table, in Markdown."""
    rule = jax_dora.DoRARule("model/layers/.*_proj", rank=RANK, alpha=RANK)
    lines = ["| model | " + " | ".join(one or "bfloat16" for one in FORMATS) + " |"]
    lines.append("| --- " * (len(FORMATS) + 1) + "|")
    for name, config in MODELS.items():
        cells = []
        for qtype in FORMATS:
            base, total = _gib(config, qtype, rule)
            cells.append(f"{base:.1f} / {total:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _gib(config: DecoderConfig, qtype: str | None, rule: Any) -> tuple[float, float]:
    """Returns the GiB of the base model, and of all that a step holds."""
    one, two = (_shares(config, layers, qtype, rule) for layers in (1, 2))
    # Every share grows by as much with every layer.
    steps = config.num_hidden_layers - 1
    shares = {name: one[name] + steps * (two[name] - one[name]) for name in one}
    return shares["base model"] / 2**30, sum(shares.values()) / 2**30


def _shares(config: DecoderConfig, layers: int, qtype: str | None, rule: Any) -> dict[str, int]:
    config = dataclasses.replace(config, num_hidden_layers=layers)

    def make() -> CausalLM:
        model = CausalLM(config, rngs=nnx.Rngs(0))
        model = model if qtype is None else jax_dora.quantize(model, qtype)
        return jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(0))

    plan: Any = SimpleNamespace(
        config=config,
        args=SimpleNamespace(batch=1, length=TOKENS),
        changes={"attention": "cudnn"},
        sharding=None,
        abstract_model=nnx.eval_shape(make),
    )
    return estimate.memory(plan)


def quality() -> str:
    """Returns what formats cost, and the long runs, in Markdown."""
    header, rows = results.read(MEASURED)
    encoder = {row["format"]: row for row in rows if row["model"] == "encoder"}
    decoder = {
        row["format"]: row for row in rows if row["model"] == "decoder" and "losses" not in row
    }
    names = ("weights", "1 − cosine", "KL", "decoder: KL", "the likeliest is the same", "trained")
    lines = [f"| format | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for name, row in decoder.items():
        trained = f"{row['held_out']:.4f}" if "held_out" in row else "–"
        cells = ["–"] * 5
        if name in encoder:
            of = encoder[name]
            cells = [f"{of['weights']:.4f}", f"{of['cosine']:.5f}", f"{of['kl']:.6f}"]
            cells += [f"{row['kl']:.7f}", f"{row['agreement']:.2%}"]
        lines.append(f"| {name} | {' | '.join([*cells, trained])} |")
    long = [row for row in rows if "losses" in row]
    lines += [
        "",
        f"Loss over {long[0]['steps']} steps of training, of each tenth, and held out:",
        "",
    ]
    count = len(long[0]["losses"])
    lines.append(f"| base | {' | '.join(str(part + 1) for part in range(count))} | held out |")
    lines.append("| --- " * (count + 2) + "|")
    for row in long:
        losses = (f"{loss:.3f}" for loss in row["losses"])
        lines.append(f"| {row['format']} | {' | '.join(losses)} | {row['held_out']:.4f} |")
    environment = header["environment"]
    told = f"Commit {environment['commit'][:7]}, jax {environment['jax']}, {environment['card']}."
    return "\n".join([*lines, "", told])


def between(page: str, begin: str, end: str, text: str) -> str:
    """Returns a page with `text` in place of what stands between two marks."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def page() -> str:
    """Returns the page with both tables as they are now."""
    return between(with_quality(), BEGIN, END, table())


def with_quality() -> str:
    """Returns the page with the measured table as it is now."""
    return between(PAGE.read_text(), *QUALITY, quality())


if __name__ == "__main__":
    PAGE.write_text(page())
