"""The tables of docs/small-memory.md: of memory, computed from shapes alone and beside it what was
measured (`benchmarks/results/h100/quantised.jsonl`), and of what formats cost
(`benchmarks/results/cpu/quality.jsonl`)."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from flax import nnx

import jax_dora
from benchmarks import results
from jax_dora.finetune import estimate
from jax_dora.models import CausalLM, DecoderConfig
from tools.measurements import RESULTS, grid, rows, table

MEASURED = RESULTS / "cpu" / "quality.jsonl"
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


def memory() -> str:
    """Returns GiB of base models and of all that a step holds, and of the steps measured."""
    rule = jax_dora.DoRARule("model/layers/.*_proj", rank=RANK, alpha=RANK)

    def cell(name: str, qtype: str | None) -> str:
        base, total = _gib(MODELS[name], qtype, rule)
        step = {"name": name.removeprefix("Llama 3 "), "qtype": qtype or "bf16", "time": TOKENS}
        measured = rows("quantised", "h100", work="step", kind="DoRA", keep_inner=None, **step)
        peaks = (f" / **{one['peak_bytes'] / 2**30:.1f}**" for one in measured)
        return f"{base:.1f} / {total:.1f}{''.join(peaks)}"

    names = {name: name for name in MODELS}
    return grid("model", names, {one or "bfloat16": one for one in FORMATS}, cell)


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
    """Returns the table of what formats cost, and of the long runs."""
    header, rows = results.read(MEASURED)
    encoder = {row["format"]: row for row in rows if row["model"] == "encoder"}
    long = [row for row in rows if "losses" in row]
    lines = []
    for row in rows:
        if row["model"] != "decoder" or row in long:
            continue
        cells = ["–"] * 5
        if of := encoder.get(row["format"]):
            cells = [f"{of['weights']:.4f}", f"{of['cosine']:.5f}", f"{of['kl']:.6f}"]
            cells += [f"{row['kl']:.7f}", f"{row['agreement']:.2%}"]
        trained = f"{row['held_out']:.4f}" if "held_out" in row else "–"
        lines.append([row["format"], *cells, trained])
    names = ("weights", "1 − cosine", "KL", "decoder: KL", "the likeliest is the same", "trained")
    tenths = map(str, range(1, 1 + len(long[0]["losses"])))
    runs = (
        [row["format"], *(f"{loss:.3f}" for loss in row["losses"]), f"{row['held_out']:.4f}"]
        for row in long
    )
    environment = header["environment"]
    parts = [
        table(["format", *names], lines),
        f"Loss over {long[0]['steps']} steps of training, of each tenth, and held out:",
        table(["base", *tenths, "held out"], runs),
        f"Commit {environment['commit'][:7]}, jax {environment['jax']}, {environment['card']}.",
    ]
    return "\n\n".join(parts)
