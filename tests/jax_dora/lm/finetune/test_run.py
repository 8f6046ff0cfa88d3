"""The whole script on its own tiny model: learning, stopping, taking up, exporting."""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import peft
import pytest
import torch
import transformers
from flax import nnx
from tensorboardX.proto import event_pb2

import jax_dora
import jax_dora.peft
from jax_dora.lm.finetune import packing, training
from jax_dora.lm.finetune.checkpoints import Checkpoints
from jax_dora.lm.finetune.run import Run
from jax_dora.lm.finetune.tiny import byte_level_tokenizer
from parity import tolerances
from tests.jax_dora.lm.finetune.runs import (
    FP8,
    OPTIONS,
    STEPS,
    finetune,
    metrics,
    plan_of,
    same_adapter,
    told,
)

ROOT = Path(__file__).parents[4]


@pytest.mark.slow
def test_learns(finished):
    lines = metrics(finished)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    assert lines[5]["eval_loss"] < lines[2]["eval_loss"]
    rates = [line["learning_rate"] for line in lines]
    assert rates[0] == pytest.approx(5e-3)
    assert rates[1] == max(rates) == pytest.approx(1e-2)


@pytest.mark.slow
def test_exports_agree_with_peft(finished):
    """PEFT on the base, and transformers on the merged folder, compute the same."""
    transformers.utils.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished / "merged")
    tokens = torch.tensor(tokenizer(["12+30=42"])["input_ids"])
    assert tokens.tolist() == [byte_level_tokenizer().encode("12+30=42").ids]
    with torch.no_grad():
        base = load(finished / "tiny-model")(tokens).logits
        merged = load(finished / "merged")(tokens).logits
        adapted = peft.PeftModel.from_pretrained(
            load(finished / "tiny-model"), finished / "adapter"
        )
        adapted = adapted.eval()(tokens).logits
    peak = max(1.0, float(adapted.abs().max()))
    assert (adapted - merged).abs().max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS * peak
    assert (adapted - base).abs().max() > 0.1 * peak
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(finished / "tiny-model")


@pytest.mark.slow
def test_what_a_run_leaves_to_look_at(finished):
    lines = metrics(finished)
    figure = (finished / "loss.svg").read_text()
    assert figure.count('<g id="line2d') > 2
    assert (finished / "adapter" / "loss.svg").read_text() == figure
    card = (finished / "adapter" / "README.md").read_text()
    assert f"for 6 steps to a loss of {lines[-1]['loss']:.4f}" in card
    assert f"{lines[-1]['eval_loss']:.4f} on evaluation data" in card
    assert 'prompt: "3+4="' in card
    assert 'expected: "7"' in card
    assert card.count("generated: ") == 3
    # The last evaluation was the best one.
    same_adapter(finished, finished, best="best")

    [events] = (finished / "tensorboard").iterdir()
    raw, place, found = events.read_bytes(), 0, []
    while place < len(raw):
        (length,) = struct.unpack("<Q", raw[place : place + 8])
        event = event_pb2.Event.FromString(raw[place + 12 : place + 12 + length])
        found += [(event.step, one.tag, one.simple_value) for one in event.summary.value]
        place += length + 16
    for line in lines:
        for name in line.keys() - {"step"}:
            assert (line["step"], name, np.float32(line[name])) in found


@pytest.mark.slow
def test_patience(command, capsys, tmp_path):
    """A rate at which nothing improves; then more patience."""
    command = [*command, "--eval-every", "1", "--learning-rate", "1e-9", "--patience", "2"]
    assert finetune(command) == 0
    assert "Stopping after 2 evaluations without a lower loss" in told(capsys)
    losses = [line["eval_loss"] for line in metrics(tmp_path / "run")]
    assert len(losses) < STEPS
    assert min(losses) == losses[-3] <= losses[-2]
    assert finetune([*command, "--resume"]) == 0
    assert "Stopping after 2 evaluations" in told(capsys)
    assert len(metrics(tmp_path / "run")) == len(losses)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.facts(len(losses))["best"] == min(losses)
    # Losses on other data are no higher and no lower.
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "3+4=", "completion": "8"}\n')
    more = ["--resume", "--eval-data", str(other), "--learning-rate", "1e-9"]
    assert finetune([*command, *more, "--steps", str(STEPS + 1)]) == 0
    assert "The evaluation data have changed" in told(capsys)
    found = [line["eval_loss"] for line in metrics(tmp_path / "run")]
    facts = checkpoints.facts(len(found))
    assert facts["best"] == min(found[len(losses) :])
    assert facts["worse"] <= 2


def test_samples_are_of_prompts_that_fit_into_a_row(inputs, tmp_path):
    long = tmp_path / "long.jsonl"
    short = {"prompt": "3+4=", "completion": "7"}
    records = [{"prompt": "x" * 1000, "completion": "y"}, short]
    long.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["finetune", *inputs, *OPTIONS, "--data", str(long), "--output", str(tmp_path)]
    plan = plan_of(command[1:])
    assert [len(one.tokens) for one in plan.examples_to_show] == [6]


@pytest.mark.parametrize("flags", ["--data A B", "--data A --data B"])
def test_several_files_are_read_as_one(flags, inputs, tmp_path):
    """As the file that holds the lines of both."""
    lines = Path(inputs[3]).read_text().splitlines(keepends=True)
    texts = {"A": lines[:30], "B": lines[30:70], "BOTH": lines[:70]}
    files = {name: str(tmp_path / name) for name in texts}
    for name, text in texts.items():
        Path(files[name]).write_text("".join(text))
    plans = []
    for data in (flags, "--data BOTH"):
        words = [files.get(word, word) for word in data.split()]
        flags_of_eval = ["--eval-data" if word == "--data" else word for word in words]
        command = [*inputs[:2], *words, *flags_of_eval, *OPTIONS]
        plans.append(plan_of([*command, "--output", str(tmp_path / "run")], every=True))
    ours, theirs = plans
    jax.tree.map(np.testing.assert_array_equal, ours.rows, theirs.rows)
    jax.tree.map(np.testing.assert_array_equal, ours.eval_rows, theirs.eval_rows)
    assert ours.fixed == theirs.fixed


@pytest.mark.parametrize(
    ("flags", "learned"), [([], 101 + 26), (["--split"], 101 + 82), (["--split", "none"], 32 + 26)]
)
def test_what_is_longer_than_a_row(flags, learned, inputs, tmp_path):
    """A text of 101 tokens and its end, and a prompt of 6 whose completion has 81 and its end."""
    data = tmp_path / "data.jsonl"
    records = [{"text": "x" * 101}, {"prompt": "y" * 6 + "=", "completion": "z" * 81}]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [*inputs[:2], "--data", str(data), *OPTIONS, *flags]
    assert plan_of([*command, "--output", str(tmp_path / "run")]).rows.weights.sum() == learned


def test_dry_run(inputs, tmp_path, capsys):
    command = [*inputs, *OPTIONS, "--output", str(tmp_path / "run"), "--dry-run"]
    assert finetune(command) == 0
    output = told(capsys)
    # 7 layers' rank-4 adapters, twice.
    features = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    trained = 2 * sum(4 * (a + b) + b for a, b in features)
    assert f"of which {trained:,} are trained" in output
    assert "81.4% of the base parameters (model/layers/.*_proj)" in output
    assert "6 of 4 rows, 0.04 epochs" in output
    assert "MiB base model" in output
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "others", "message"),
    [
        (["--quantize", "nf4"], ["--quantize", "int8"], "quantize was 'nf4' and is 'int8'"),
        (
            ["--quantize", FP8, "--activations", FP8, "--gradients", "float8_e5m2"],
            ["--quantize", FP8, "--activations", FP8],
            "--gradients was 'float8_e5m2' and is None",
        ),
    ],
)
def test_over_a_quantised_base(formats, others, message, inputs, tmp_path, capsys):
    command = [*inputs, *OPTIONS, "--output", str(tmp_path / "run")]
    assert finetune([*command, *formats, "--steps", "3"]) == 0
    kind = "transposed" if "--gradients" in formats else "dequantised"
    assert f"MiB its {kind} kernels" in told(capsys)
    assert [math.isfinite(line["loss"]) for line in metrics(tmp_path / "run")] == [True] * 3
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert finetune([*command, *others, "--steps", "4", "--resume"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_layers_apart_are_the_same_run(inputs, tmp_path):
    losses = []
    for name, options in (("scan", ()), ("apart", ("--unroll",))):
        output = tmp_path / name
        assert finetune([*inputs, *OPTIONS, *options, "--output", str(output)]) == 0
        losses.append([line["loss"] for line in metrics(output)])
    assert len(losses[0]) > 1
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
def test_accumulation_is_one_large_batch(inputs, tmp_path):
    """The gradient of four micro-batches is that of one batch four times as large."""
    flags = ["--output", str(tmp_path / "run"), "--dropout", "0", "--target", ".*/(up|o)_proj"]
    run = Run(plan_of([*inputs, *OPTIONS, *flags]))
    rows = packing.batch(run.plan.rows, 0, (2, 2), seed=1)
    large = packing.Rows(*(array.reshape(1, 4, -1) for array in rows))
    (loss, gradients, _), (large_loss, large_gradients, _) = (
        training.accumulate(*run.parts, one) for one in (rows, large)
    )
    np.testing.assert_allclose(loss, large_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(large_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max() + 1e-12)


@pytest.mark.slow
def test_magnitudes_are_not_decayed():
    layer = jax_dora.DoRALinear(4, 3, rank=2, alpha=2, rngs=nnx.Rngs(0))
    adapters = nnx.state(layer, nnx.LoRAParam)
    before = {name: np.array(value) for name, value in nnx.to_pure_dict(adapters).items()}
    optimizer = training.make_optimizer("adamw", lambda _: 0.5, clip=1.0, weight_decay=0.5)
    zeros = jax.tree.map(jax.numpy.zeros_like, adapters)
    after, _, _ = training.update(
        optimizer, adapters, optimizer.init(adapters), zeros, jax.numpy.float32(0)
    )
    np.testing.assert_array_equal(after["magnitude"][...], before["magnitude"])
    np.testing.assert_allclose(after["lora_a"][...], 0.75 * before["lora_a"], rtol=1e-6)


def test_flax_optimizer_does_not_decay_magnitudes():
    """`nnx.Optimizer` calls a mask with arrays, not variables, when it updates."""
    layer = jax_dora.DoRALinear(4, 3, rank=2, alpha=2, rngs=nnx.Rngs(0))
    before = nnx.clone(layer)
    adamw = optax.adamw(0.5, weight_decay=0.5, mask=training.decayed)
    optimizer = nnx.Optimizer(layer, adamw, wrt=nnx.LoRAParam)
    optimizer.update(layer, jax.tree.map(jax.numpy.zeros_like, nnx.state(layer, nnx.LoRAParam)))
    np.testing.assert_array_equal(layer.magnitude[...], before.magnitude[...])
    np.testing.assert_allclose(layer.lora_a[...], 0.75 * before.lora_a[...], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["examples/finetune.py"], ["-m", "jax_dora", "finetune"]])
def test_runs_as_a_script(command):
    result = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--accumulate" in result.stdout
