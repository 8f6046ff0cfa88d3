"""The memory of fine-tuning over a quantised base model, computed from shapes alone."""

import dataclasses

from flax import nnx

import jax_dora
from benchmarks.quantised_steps import LLAMA_3_70B, QWEN_3_14B, QWEN_3_32B
from benchmarks.results import Row, rows
from benchmarks.step import LLAMA_3_8B
from jax_dora.lm.finetune import estimate
from jax_dora.lm.models import CausalLM, DecoderConfig

RANK = 16
# For each model its name in `h100/quantised.jsonl`, and the numbers of tokens of a step.
MODELS = {
    "Llama 3 8B": ("8B", LLAMA_3_8B, (4096,)),
    "Qwen3 14B": ("14B", QWEN_3_14B, (4096,)),
    "Qwen3 32B": ("32B", QWEN_3_32B, (4096,)),
    "Llama 3 70B": ("70B", LLAMA_3_70B, (4096, 2048)),
}


def memory() -> list[Row]:
    """Returns a row for each model, number of tokens and format of the base model: the computed
    bytes of the base model, `base`, and of everything in memory during a step, `total`; and, if
    the step was measured, its bytes, `peak`."""
    measured = {
        (line["name"], line["qtype"], line["time"]): line["peak_bytes"]
        for work in ("step", "memory")
        for line in rows("quantised", "h100", work=work, kind="DoRA", keep_inner=None)
        if "peak_bytes" in line
    }
    found = []
    for model, (name, config, lengths) in MODELS.items():
        for tokens in lengths:
            for qtype in ("bf16", "int8", "float8_e4m3fn", "nf4"):
                base, total = _bytes(config, None if qtype == "bf16" else qtype, tokens)
                line = {"model": model, "tokens": tokens, "qtype": qtype, "base": base}
                peak = measured.get((name, qtype, tokens))
                found.append(line | {"total": total} | ({"peak": peak} if peak else {}))
    return found


def _bytes(config: DecoderConfig, qtype: str | None, tokens: int) -> tuple[int, int]:
    """Returns the bytes of the base model, and of everything in memory during a step."""
    config = dataclasses.replace(config, attention="cudnn")
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

    return estimate.memory(nnx.eval_shape(make), 1, tokens)
