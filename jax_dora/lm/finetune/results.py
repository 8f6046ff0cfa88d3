"""The results of a run: what it returns, a figure of the losses, samples, and a model card."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import jax_dora
from dora_common.replacement import replace_text, replaced_file
from jax_dora.lm.finetune.log import Line
from jax_dora.lm.finetune.packing import Example
from jax_dora.lm.finetune.plan import FIXED, Plan
from jax_dora.lm.models import CausalLM, generate

SAMPLE_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
      metrics: the metrics of all finished steps, as in metrics.jsonl.
      adapter: the PEFT folder with the adapter; None if the run was interrupted before its end.
      best: the PEFT folder with the adapter of the lowest evaluation loss, or None.
      is_interrupted: whether Ctrl-C or SIGTERM has stopped the run. It can be resumed.
    """

    metrics: list[Line]
    adapter: Path | None
    best: Path | None
    is_interrupted: bool


class Sample(NamedTuple):
    """A prompt of the data, its completion in the data, and the completion by the model."""

    prompt: str
    expected: str
    generated: str


def draw_losses(lines: list[Line], file: Path) -> None:
    """Draws the losses of metrics.jsonl."""
    from matplotlib.figure import Figure  # imported late, since the import is slow

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([one["step"] for one in lines], [one["loss"] for one in lines], label="training")
    evaluated = [one for one in lines if "eval_loss" in one]
    if evaluated:
        steps, losses = zip(*((one["step"], one["eval_loss"]) for one in evaluated), strict=True)
        axes.plot(steps, losses, marker="o", label="evaluation")
    axes.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    with replaced_file(file) as new:
        figure.savefig(new, metadata={"Date": None})


def take_samples(plan: Plan, model: CausalLM) -> list[Sample]:
    """Returns the model's greedy completions of the first prompts of the data."""
    pairs = [_split(example) for example in plan.examples_to_show]
    pairs = [(prompt, answer) for prompt, answer in pairs if prompt]
    if not pairs:
        return []
    prompts = [prompt for prompt, _ in pairs]
    answers = generate(jax_dora.freeze(model), prompts, SAMPLE_TOKENS, ends=plan.texts.end_tokens)
    decode = plan.texts.tokenizer.decode
    return [
        Sample(decode(prompt), decode(expected), decode(answer))
        for (prompt, expected), answer in zip(pairs, answers, strict=True)
    ]


def write_card(plan: Plan, lines: list[Line], samples: list[Sample], file: Path) -> None:
    """Writes the model card of the adapter, with its losses, settings and samples."""
    evaluated = [one["eval_loss"] for one in lines if "eval_loss" in one]
    name = {"dora": "DoRA", "lora": "LoRA"}[plan.settings.method or "dora"]
    settings = {name: getattr(plan.settings, name) for name in FIXED}
    settings |= {"steps": lines[-1]["step"], "rows of a step": plan.fixed["rows of a step"]}
    text = [
        "---",
        f"base_model: {json.dumps(str(plan.folder))}",
        "library_name: peft",
        "pipeline_tag: text-generation",
        f"tags: [{', '.join(dict.fromkeys((name.lower(), 'lora')))}, jax_dora]",
        "---",
        "",
        f"# A {name} adapter for {plan.folder.name}",
        "",
        f"Trained by `jax-dora finetune` for {lines[-1]['step']} steps to a loss of "
        f"{lines[-1]['loss']:.4f} nats per token"
        + (f", {evaluated[-1]:.4f} on evaluation data." if evaluated else "."),
        "",
        "![losses](loss.svg)",
        "",
        "| setting | |",
        "| --- | --- |",
        *(f"| {name.replace('_', ' ')} | {value} |" for name, value in settings.items()),
    ]
    for one in samples:
        shown = one._asdict().items()
        text += ["", *(f"    {name}: {json.dumps(x, ensure_ascii=False)}" for name, x in shown)]
    replace_text(file, "\n".join(text) + "\n")


def _split(example: Example) -> tuple[list[int], list[int]]:
    """Returns the tokens before the first learned span, and the tokens of that span."""
    if True not in example.learned:
        return [], []
    start = example.learned.index(True)
    rest = example.learned[start:]
    stop = start + (rest.index(False) if False in rest else len(rest))
    return example.tokens[:start], example.tokens[start:stop]
