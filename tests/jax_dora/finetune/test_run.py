"""The whole script on its own tiny model: learning, stopping, taking up, exporting."""

import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx
from rich.console import Console
from safetensors.numpy import load_file
from tensorboardX.proto import event_pb2

import jax_dora
import jax_dora.models as decoder
import jax_dora.peft
from dora_common.disk import locked
from jax_dora.commands import main, parser
from jax_dora.finetune import data, estimate, guard, training
from jax_dora.finetune.checkpoints import Checkpoints
from jax_dora.finetune.plan import Plan
from jax_dora.finetune.run import Run
from jax_dora.finetune.tiny import byte_level_tokenizer
from parity import tolerances
from tests.tables import thinned

ROOT = Path(__file__).parents[3]
FP8 = "float8_e4m3fn"
STEPS = 6
OPTIONS = (
    *("--rank", "4", "--dropout", "0.1", "--length", "32", "--batch", "2", "--accumulate", "2"),
    *("--steps", str(STEPS), "--learning-rate", "1e-2", "--weight-decay", "0.1", "--warmup", "2"),
    *("--checkpoint-every", "2", "--eval-every", "3"),
)


OUT_OF_RANGE = {
    "--rank": "0 -1 1.5 99999999999",
    "--alpha": "0 -1 nan inf 1e308 1e-300",
    "--dropout": "1 -0.1 nan",
    "--length": "0",
    "--steps": "0 -1",
    "--epochs": "0 -1 inf nan 1e300",
    "--batch": "0",
    "--accumulate": "0",
    "--learning-rate": "0 -1 nan x 1e39",
    "--warmup": "-1",
    "--weight-decay": "-0.1 inf",
    "--clip": "0 -1 nan",
    "--seed": "-1 4294967296",
    "--checkpoint-every": "0",
    "--eval-every": "0",
    "--keep": "0 -1",
}


def finetune(options):
    return main(["finetune", *options])


def told(capsys):
    """What was printed, on one line."""
    return " ".join("".join(capsys.readouterr()).split())


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_speed(lines):
    return [{name: x for name, x in line.items() if name != "tokens_per_second"} for line in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nothing interrupted, with its evaluation and both exports."""
    output = tmp_path_factory.mktemp("finished")
    eval_data = output / "eval.jsonl"
    eval_data.write_text('{"prompt": "3+4=", "completion": "7"}\n' * 5)
    command = ["--tiny", *OPTIONS, "--output", str(output), "--eval-data", str(eval_data)]
    assert finetune([*command, "--merge", str(output / "merged"), "--tensorboard"]) == 0
    return output


@pytest.fixture
def command(finished, tmp_path):
    """The same run from the files that the first one made."""
    return [
        *("--model", str(finished / "tiny-model"), "--data", str(finished / "tiny.jsonl")),
        *("--eval-data", str(finished / "eval.jsonl")),
        *OPTIONS,
        *("--output", str(tmp_path / "run")),
    ]


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
    assert "--patience: 2 evaluations without a lower loss; stopping" in told(capsys)
    losses = [line["eval_loss"] for line in metrics(tmp_path / "run")]
    assert len(losses) < STEPS
    assert min(losses) == losses[-3] <= losses[-2]
    assert finetune([*command, "--resume"]) == 0
    assert len(metrics(tmp_path / "run")) == len(losses)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.facts(len(losses))["best"] == min(losses)


def test_dry_run(inputs, tmp_path, capsys):
    command = [*inputs, *OPTIONS, "--output", str(tmp_path / "run"), "--dry-run"]
    assert finetune(command) == 0
    output = told(capsys)
    # 7 layers' rank-4 adapters, twice.
    features = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    trained = 2 * sum(4 * (a + b) + b for a, b in features)
    assert f"of which {trained:,} are trained" in output
    assert "81.4% of the base's, by --target model/layers/.*_proj" in output
    assert "6 of 4 rows, 0.19 epochs" in output
    assert "MiB base model" in output
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_over_a_quantised_base(inputs, tmp_path, capsys):
    output = tmp_path / "run"
    command = [*inputs, *OPTIONS, "--output", str(output), "--quantize", "nf4", "--steps", "3"]
    assert finetune(command) == 0
    assert "MiB a kernel, dequantised" in told(capsys)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert (output / "adapter" / "adapter_model.safetensors").exists()
    assert finetune([*command, "--steps", "4", "--resume", "--quantize", "int8"]) == 2
    assert "quantize was 'nf4' and is 'int8'" in capsys.readouterr().err


@pytest.mark.slow
def test_over_activations_in_fp8(inputs, tmp_path, capsys):
    command = [*inputs, *OPTIONS, "--output", str(tmp_path / "run"), "--quantize", FP8]
    assert finetune([*command, "--activations", FP8, "--steps", "3"]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(math.isfinite(json.loads(line)["loss"]) for line in lines)
    assert finetune([*command, "--steps", "4", "--resume"]) == 2
    assert "activations was 'float8_e4m3fn' and is None" in capsys.readouterr().err


@pytest.mark.slow
def test_layers_apart_are_the_same_run(inputs, tmp_path):
    losses = []
    for name, options in (("scan", ()), ("apart", ("--unroll",))):
        output = tmp_path / name
        assert finetune([*inputs, *OPTIONS, *options, "--output", str(output)]) == 0
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) > 1
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
def test_memory_is_about_what_xla_takes(inputs, tmp_path):
    options = ["--length", "256", "--batch", "4", "--accumulate", "2", "--rank", "8"]
    args = parser().parse_args(["finetune", *inputs, *options, "--output", str(tmp_path / "run")])
    plan = Plan(args, Console())
    parts = training.take_apart(plan.abstract_model)
    rows = jax.eval_shape(lambda: data.batch(plan.rows, 0, (2, 4), 0))
    compiled = training.accumulate.lower(*parts, rows).compile().memory_analysis()
    taken = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
    assert 0.5 < sum(estimate.memory(plan).values()) / taken < 2


def interrupt_at(monkeypatch, step):
    original = data.batch

    def batch(rows, place, *rest):
        if place == step - 1:
            signal.raise_signal(signal.SIGINT)
        return original(rows, place, *rest)

    monkeypatch.setattr(data, "batch", batch)


@pytest.mark.slow
def test_ctrl_c_and_resume_are_bitwise_the_same_run(
    finished, command, monkeypatch, capsys, tmp_path
):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        assert finetune(command) == 130
    assert "Interrupted after step 3; Step 3 is saved" in told(capsys)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    assert not (tmp_path / "run" / "adapter").exists()

    assert finetune(command) == 2
    assert "holds a run already; pass --resume" in told(capsys)
    assert finetune([*command, "--resume", "--rank", "5"]) == 2
    assert "rank was 4 and is 5" in told(capsys)

    # What a killed process may have written after its last checkpoint.
    with (tmp_path / "run" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 9}\n{"step": 5, "lo')
    training.accumulate.clear_cache()
    training.update.clear_cache()
    assert finetune([*command, "--resume"]) == 0
    # What is restored is as what a step returns, so that nothing is compiled twice.
    assert (training.accumulate._cache_size(), training.update._cache_size()) == (1, 1)
    assert without_speed(metrics(tmp_path / "run")) == without_speed(metrics(finished))
    same_adapter(tmp_path / "run", finished)


@pytest.mark.slow
def test_nan_stops_and_leaves_the_last_checkpoint(command, monkeypatch, capsys, tmp_path):
    original = training.update

    factors = iter((1.0, 1.0, np.nan))

    def update(optimizer, adapters, state, gradients, loss):
        return original(optimizer, adapters, state, gradients, loss * next(factors))

    monkeypatch.setattr(training, "update", update)
    assert finetune(command) == 1
    output = told(capsys)
    found = re.search(
        r"Stopped: step 3: the loss is not finite \(.*on the same rows is (.*?)\.", output
    )
    assert found, output
    assert 4 < float(found[1]) < 12
    assert "Step 2 is saved: the same command with --resume" in output
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps() == [2]
    assert checkpoints.facts(2)["settings"]["rank"] == 4
    monkeypatch.setattr(training, "update", original)
    assert finetune([*command, "--resume"]) == 0


@pytest.mark.slow
def test_explosion_stops(command, capsys, tmp_path):
    """Weights that the decay multiplies by -999 at every step."""
    options = ["--learning-rate", "1e4", "--schedule", "constant", "--warmup", "0"]
    assert finetune([*command, *options, "--steps", "100"]) == 1
    stopped = re.search(r"Stopped: step (\d+): the", told(capsys))
    assert stopped
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert all(step < int(stopped[1]) for step in checkpoints.steps())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model or --data is missing"),
        (["--tiny", "--model", "x"], "--model and --tiny are both given"),
        (["--tiny", "--data", "missing.jsonl"], "--data missing.jsonl is no file"),
        (["--target", "nothing"], "matches no layer"),
        (["--target", ".*"], "the rules match what cannot be adapted"),
        (["--tiny", "--target", "("], "'(' is no regular expression"),
        (["--steps", "5", "--warmup", "5"], "--warmup 5 leaves nothing of the 5 steps"),
        (["--model", "missing", "--data", str(ROOT / "README.md")], "config.json is missing"),
        (["--activations", FP8], "the model is not quantised; expected quantize="),
        (["--tiny", "--merge="], "argument --merge: it is empty; expected a folder"),
        (["--tiny", "--unknown"], "unrecognized arguments: --unknown"),
        *(
            (["--tiny", flag, value], f"argument {flag}: '{value}' is out of range")
            for flag, values in OUT_OF_RANGE.items()
            for value in values.split()
        ),
    ],
)
def test_bad_options(options, message, inputs, tmp_path, capsys):
    if "--tiny" not in options and "--model" not in options and options:
        options = [*inputs, *options]
    assert finetune([*options, "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", [], "config.json holds a list; expected a JSON object"),
        ("config.json", {"hidden_size": "a"}, "hidden_size 'a'; expected a positive integer"),
        ("config.json", {"rms_norm_eps": None}, "config.json has a field of another type"),
        ("config.json", {"rope_scaling": 3}, "config.json has a field of another type"),
        ("config.json", {"quantization_config": "x"}, "config.json has a field of another type"),
        ("generation_config.json", [], "generation_config.json holds a list"),
        ("tokenizer_config.json", 3, "tokenizer_config.json holds a int"),
        ("tokenizer_config.json", {"chat_template": 3}, "has the chat template 3; expected"),
        ("tokenizer_config.json", {"chat_template": ["x"]}, "has the chat template ['x']; "),
        ("tokenizer_config.json", {"chat_template": [{}]}, "has the chat templates None; "),
        ("special_tokens_map.json", [], "special_tokens_map.json holds a list"),
    ],
)
def test_damaged_model_folders(file, fields, message, inputs, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(inputs[1], model)
    there = json.loads((model / file).read_text()) if (model / file).exists() else {}
    fields = there | fields if isinstance(fields, dict) else fields
    (model / file).write_text(json.dumps(fields))
    command = ["--model", str(model), *inputs[2:], *OPTIONS, "--output", str(tmp_path / "run")]
    assert finetune([*command, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("target", ["model/embed_tokens", "model/(embed_tokens|.*/o_proj)"])
def test_an_embedding_beside_a_tied_head(finished, command, target, capsys, caplog, tmp_path):
    """Trained as in PEFT, where the head stays as it is; merging could not say so."""
    command = [*command, "--target", target, "--steps", "3"]
    assert finetune([*command, "--merge", str(tmp_path / "merged")]) == 2
    assert "leave out --merge, or the embedding" in told(capsys)
    assert finetune(command) == 0
    assert "adapt_attend" not in caplog.text

    tokens = np.array([byte_level_tokenizer().encode("12+30=42").ids])
    base = transformers.AutoModelForCausalLM.from_pretrained(finished / "tiny-model")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    model = decoder.load_model(finished / "tiny-model")
    ours = jax_dora.peft.load_adapter(model, tmp_path / "run" / "adapter")
    ours.eval()
    found = np.asarray(ours(jax.numpy.asarray(tokens)))
    peak = max(1.0, np.abs(expected).max())
    assert np.abs(found - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS * peak


@pytest.mark.slow
def test_accumulation_is_one_large_batch(inputs, tmp_path):
    """The gradient of four micro-batches is that of one batch four times as large."""
    args = parser().parse_args(["finetune", *inputs, *OPTIONS])
    args.output, args.dropout, args.target = tmp_path / "run", 0.0, ".*/(up|o)_proj"
    run = Run(Plan(args, Console()))
    rows = data.batch(run.plan.rows, 0, (2, 2), seed=1)
    large = data.Rows(*(array.reshape(1, 4, -1) for array in rows))
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
    optimizer = training.make_optimizer(lambda _: 0.5, clip=1.0, weight_decay=0.5)
    zeros = jax.tree.map(jax.numpy.zeros_like, adapters)
    after, _, _ = training.update(
        optimizer, adapters, optimizer.init(adapters), zeros, jax.numpy.float32(0)
    )
    np.testing.assert_array_equal(after["magnitude"][...], before["magnitude"])
    np.testing.assert_allclose(after["lora_a"][...], 0.75 * before["lora_a"], rtol=1e-6)


def test_guard():
    def check(one, loss, finite=True, base=2.5):
        metrics = training.Metrics(np.float32(loss), np.float32(1), np.bool_(finite))
        one.check(7, metrics, lambda: base)

    calm = guard.LossGuard()
    for loss in (2.0, 2.5, 1.8, 3.5, 0.01, 0.02):
        check(calm, loss)
    check(guard.LossGuard(0.01), 1.5)  # a noisy end is no explosion
    with pytest.raises(guard.DivergedError, match="step 7: the loss is 9, over 6"):
        check(guard.LossGuard(2.0), 9.0)
    with pytest.raises(guard.DivergedError, match=r"the loss is not finite .* rows is 2\.5$"):
        check(calm, np.nan, finite=False)
    with pytest.raises(guard.DivergedError, match="rows is nan, not finite either: check its"):
        check(calm, np.inf, finite=False, base=np.nan)
    with pytest.raises(guard.DivergedError, match="the gradient or the updated adapter is not"):
        check(calm, 1.0, finite=False)


def test_second_ctrl_c_interrupts():
    # What started these tests may have told its children to ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with guard.Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            assert interruption.requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def same_adapter(a, b, best="adapter"):
    ours = load_file(a / "adapter" / "adapter_model.safetensors")
    theirs = load_file(b / best / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(finished, command, capsys, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished / "checkpoints", run / "checkpoints")
    shutil.copy(finished / "metrics.jsonl", run)
    largest = run / "checkpoints" / "6" / "arrays.safetensors"
    raw = bytearray(largest.read_bytes())
    raw[-9] ^= 1
    largest.write_bytes(raw)
    assert finetune([*command, "--resume"]) == 0
    output = told(capsys)
    assert f"--resume: {largest} is damaged" in output
    assert "--resume: going on after step 4 of 6" in output
    assert without_speed(metrics(run)) == without_speed(metrics(finished))
    same_adapter(run, finished)

    for step in (2, 4, 6):
        (run / "checkpoints" / str(step) / "facts.json").write_text("{}")
    assert finetune([*command, "--resume"]) == 2
    assert "none of the checkpoints in" in told(capsys)


@pytest.mark.slow
def test_nothing_to_resume_is_said_and_a_run_is_prolonged(finished, command, capsys, tmp_path):
    command = [*command, "--schedule", "constant", "--eval-every", "2"]
    assert finetune([*command, "--steps", "4", "--resume"]) == 0
    assert "has no checkpoint; starting at step 1" in told(capsys)
    assert finetune([*command, "--resume", "--dropout", "0.2"]) == 2
    assert finetune([*command, "--resume", "--steps", "3"]) == 2
    assert "the run is at step 4, after the last of 3" in told(capsys)
    assert finetune([*command, "--resume"]) == 0
    assert "the run had 4 steps and has 6" in told(capsys)
    assert finetune([*command, "--output", str(tmp_path / "whole")]) == 0
    assert without_speed(metrics(tmp_path / "run")) == without_speed(metrics(tmp_path / "whole"))
    same_adapter(tmp_path / "run", tmp_path / "whole")


def test_a_folder_in_use(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    with locked(run):
        assert finetune(["--tiny", "--output", str(run)]) == 2
    assert "is in use by another run" in told(capsys)
    assert list(run.iterdir()) == []


STOPS = {
    "memory": (MemoryError("8 GiB"), 1, "Out of memory: 8 GiB. Nothing is saved yet"),
    "device": (
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nlong table"),
        1,
        "Out of memory on the device: RESOURCE_EXHAUSTED: Out of memory. Nothing is saved",
    ),
    "disk": (
        OSError(28, "No space left", "x"),
        1,
        "The disk is full: [Errno 28] No space left: 'x'",
    ),
    "interrupt": (KeyboardInterrupt(), 130, "Interrupted. Nothing is saved yet"),
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", thinned(STOPS, ["device"]))
def test_what_stops_a_run_is_told_in_one_line(reason, inputs, tmp_path, monkeypatch, capsys):
    error, status, message = STOPS[reason]
    command = [*inputs, *OPTIONS, "--output", str(tmp_path / "run")]

    def fail(*_):
        raise error

    monkeypatch.setattr(data, "batch", fail)
    assert finetune(command) == status
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    # The corrected command is accepted.
    monkeypatch.setattr(Run, "train", lambda _: 0)
    assert finetune(command) == 0


def test_interrupted_while_it_starts():
    """Before anything is imported that takes long."""
    code = (
        "import signal, sys, dora_common.start as start\n"
        "sys.modules['jax_dora.commands'] = type('M', (), {\n"
        "  'main': lambda: signal.raise_signal(signal.SIGINT)})\n"
        "start.jax_dora()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (130, "Interrupted.", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["examples/finetune.py"], ["-m", "jax_dora", "finetune"], ["-m", "jax_dora.finetune"]],
)
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
