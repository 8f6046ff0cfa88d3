"""The tables of docs/small-memory.md.

One is the memory of fine-tuning, computed from shapes alone, and measured
(`benchmarks/results/h100/quantised.jsonl`). The other is how much each format changes a model's
results (`benchmarks/results/cpu/quality.jsonl`).
"""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

from flax import nnx

import jax_dora
from benchmarks import results
from benchmarks.quantised import LLAMA_3_70B, QWEN_3_14B, QWEN_3_32B
from benchmarks.step import LLAMA_3_8B
from jax_dora.lm.finetune import estimate
from jax_dora.lm.models import CausalLM, DecoderConfig
from tools.markdown import gib, grid, table

MEASURED = results.FOLDER / "cpu" / "quality.jsonl"
RANK, TOKENS = 16, 4096
WORKS = ("step", "memory")
FORMATS = (None, "int8", "float8_e4m3fn", "nf4")
MODELS = {
    "Llama 3 8B": LLAMA_3_8B,
    "Qwen3 14B": QWEN_3_14B,
    "Qwen3 32B": QWEN_3_32B,
    "Llama 3 70B": LLAMA_3_70B,
}


def memory() -> str:
    """Returns the GiB of base models, of everything in memory during a step, and of measured
    steps, and how far the computed numbers are from the measured ones."""

    def cell(name: str, qtype: str | None) -> str:
        base, total = _bytes(name, qtype, TOKENS)
        peaks = (
            row["peak_bytes"]
            for row in _measured_steps()
            if (row["name"], row["qtype"], row["time"]) == (_short(name), qtype or "bf16", TOKENS)
        )
        return f"{gib(base)} / {gib(total)}{''.join(f' / **{gib(peak)}**' for peak in peaks)}"

    names = {name: name for name in MODELS}
    rows = grid("model", names, {one or "bfloat16": one for one in FORMATS}, cell)
    return f"{rows}\n\nComputed minus measured: {'; '.join(map(_excess, _measured_steps()))}."


def _measured_steps() -> list[dict[str, Any]]:
    fields = {"kind": "DoRA", "keep_inner": None}
    works = (results.rows("quantised", "h100", work=work, **fields) for work in WORKS)
    return [row for row in itertools.chain(*works) if "peak_bytes" in row]


def _short(name: str) -> str:
    """Returns the name of a model in the results of measurements."""
    return name.split()[-1]


def _excess(row: dict[str, Any]) -> str:
    """Returns by how much the computed memory of a measured step is too large."""
    name = next(name for name in MODELS if _short(name) == row["name"])
    qtype, peak = row["qtype"], row["peak_bytes"]
    _, total = _bytes(name, None if qtype == "bf16" else qtype, row["time"])
    difference = (total - peak) / 2**30
    step = f"{name}, {qtype}, {row['time']} tokens"
    return f"{difference:+.1f} GiB ({total / peak - 1:+.0%}) for {step}"


def _bytes(name: str, qtype: str | None, tokens: int) -> tuple[int, int]:
    """Returns the bytes of the base model, and of everything in memory during a step."""
    config = dataclasses.replace(MODELS[name], attention="cudnn")
    one, two = (_parts(config, layers, qtype, tokens) for layers in (1, 2))
    # Each further layer adds the same number of bytes.
    further = config.num_hidden_layers - 1
    parts = {name: one[name] + further * (two[name] - one[name]) for name in one}
    return parts["base model"], sum(parts.values())


def _parts(config: DecoderConfig, layers: int, qtype: str | None, tokens: int) -> dict[str, int]:
    """Returns the bytes of each part of the memory of a step with this number of layers."""
    rule = jax_dora.DoRARule("model/layers/.*_proj", rank=RANK, alpha=RANK)
    config = dataclasses.replace(config, num_hidden_layers=layers)

    def make() -> CausalLM:
        model = CausalLM(config, rngs=nnx.Rngs(0))
        model = model if qtype is None else jax_dora.quantize(model, qtype)
        return jax_dora.apply_dora(model, rule, rngs=nnx.Rngs(0))

    plan: Any = SimpleNamespace(
        config=config,
        args=SimpleNamespace(batch=1, length=tokens),
        changes={"attention": "cudnn"},
        sharding=None,
        abstract_model=nnx.eval_shape(make),
    )
    return estimate.memory(plan)


def quality() -> str:
    """Returns the table of the formats, and the one of the long runs."""
    header, rows = results.read(MEASURED)
    encoder = {row["format"]: row for row in rows if row["model"] == "encoder"}
    long = [row for row in rows if "losses" in row]
    lines = []
    for row in rows:
        if row["model"] != "decoder" or row in long:
            continue
        cells = ["–"] * 8
        if other := encoder.get(row["format"]):
            cells = [f"{other['weights']:.4f}", f"{other['cosine']:.5f}", f"{other['kl']:.6f}"]
            cells += [f"{other['agreement']:.2%}", f"{row['weights']:.4f}"]
            cells += [f"{row['cosine']:.7f}", f"{row['kl']:.7f}", f"{row['agreement']:.2%}"]
        trained = f"{row['held_out']:.4f}" if "held_out" in row else "–"
        lines.append([row["format"], *cells, trained])
    names = ("weights", "1 − cosine", "KL", "top-1")
    names = (*names, f"decoder: {names[0]}", *names[1:], "trained")
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
