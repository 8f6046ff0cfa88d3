"""The whole script on its own tiny model: learning, stopping, taking up, exporting."""

import json
import os
import re
import signal
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

import jax_dora
import jax_dora.finetune.command as finetune
import jax_dora.models as decoder
import jax_dora.peft
from jax_dora.finetune import data, guard, training
from jax_dora.finetune.checkpoints import Checkpoints
from jax_dora.finetune.run import Run
from jax_dora.finetune.tiny import byte_level_tokenizer
from parity import tolerances

ROOT = Path(__file__).parents[3]
STEPS = 6
OPTIONS = (
    *("--rank", "4", "--dropout", "0.1", "--length", "32", "--batch", "2", "--accumulate", "2"),
    *("--steps", str(STEPS), "--learning-rate", "1e-2", "--weight-decay", "0.1", "--warmup", "2"),
    *("--checkpoint-every", "2", "--eval-every", "3"),
)


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
    assert finetune.main([*command, "--merge", str(output / "merged")]) == 0
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
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
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
    assert (adapted - merged).abs().max() <= tolerances.OPERATOR_FP32_MAX_ABS * peak
    assert (adapted - base).abs().max() > 0.1 * peak
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(finished / "tiny-model")


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
        assert finetune.main(command) == 130
    assert "Interrupted after step 3 of 6, and saved" in capsys.readouterr().out
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    assert not (tmp_path / "run" / "adapter").exists()

    assert finetune.main(command) == 2
    assert "holds a run already; pass --resume" in capsys.readouterr().out
    assert finetune.main([*command, "--resume", "--rank", "5"]) == 2
    assert "rank was 4 and is 5" in capsys.readouterr().out

    # What a killed process may have written after its last checkpoint.
    with (tmp_path / "run" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 9}\n')
    assert finetune.main([*command, "--resume"]) == 0
    assert without_speed(metrics(tmp_path / "run")) == without_speed(metrics(finished))
    ours = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    theirs = load_file(finished / "adapter" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])


@pytest.mark.slow
def test_nan_stops_and_leaves_the_last_checkpoint(command, monkeypatch, capsys, tmp_path):
    original = data.batch

    def batch(rows, place, *rest):
        rows = original(rows, place, *rest)
        if place == 2:
            rows.weights[rows.weights > 0] = np.nan
        return rows

    monkeypatch.setattr(data, "batch", batch)
    assert finetune.main(command) == 1
    output = capsys.readouterr().out
    assert "Stopped: step 3: the loss is not finite" in output
    assert "last good checkpoint" in output
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=3) as checkpoints:
        assert checkpoints.latest() == 2
        assert checkpoints.facts(2)["settings"]["rank"] == 4
    monkeypatch.setattr(data, "batch", original)
    assert finetune.main([*command, "--resume"]) == 0


@pytest.mark.slow
def test_explosion_stops(command, capsys, tmp_path):
    """Weights that the decay multiplies by -999 at every step."""
    options = ["--learning-rate", "1e4", "--schedule", "constant", "--warmup", "0"]
    assert finetune.main([*command, *options, "--steps", "100"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    stopped = re.search(r"Stopped: step (\d+): the", output)
    assert stopped
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=3) as checkpoints:
        latest = checkpoints.latest()
        assert latest is None or latest < int(stopped[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model or --data is missing"),
        (["--tiny", "--model", "x"], "--model and --tiny are both given"),
        (["--tiny", "--data", "missing.jsonl"], "--data missing.jsonl is no file"),
        (["--tiny", "--rank", "0"], "rank is 0"),
        (["--tiny", "--target", "nothing"], "matches no layer"),
        (["--model", "missing", "--data", str(ROOT / "README.md")], "config.json is missing"),
    ],
)
def test_bad_options(options, message, tmp_path, capsys):
    assert finetune.main([*options, "--output", str(tmp_path / "run")]) == 2
    assert message in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("target", ["model/embed_tokens", "model/(embed_tokens|.*/o_proj)"])
def test_an_embedding_beside_a_tied_head(finished, command, target, capsys, caplog, tmp_path):
    """Trained as in PEFT, where the head stays as it is; merging could not say so."""
    command = [*command, "--target", target, "--steps", "2"]
    assert finetune.main([*command, "--merge", str(tmp_path / "merged")]) == 2
    assert "leave out --merge, or the embedding" in " ".join(capsys.readouterr().out.split())
    assert finetune.main(command) == 0
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
    assert np.abs(found - expected).max() <= tolerances.OPERATOR_FP32_MAX_ABS * peak


def test_accumulation_is_one_large_batch(finished):
    """The gradient of four micro-batches is that of one batch four times as large."""
    args = finetune.parser().parse_args(
        ["--model", str(finished / "tiny-model"), "--data", str(finished / "tiny.jsonl"), *OPTIONS]
    )
    args.output, args.dropout, args.target = finished / "accumulation", 0.0, ".*/(up|o)_proj"
    run = Run(args, Console())
    rows = data.batch(run.rows, 0, (2, 2), seed=1)
    large = data.Rows(*(array.reshape(1, 4, -1) for array in rows))
    (loss, gradients, _), (large_loss, large_gradients, _) = (
        training.accumulate(*run.parts, one) for one in (rows, large)
    )
    np.testing.assert_allclose(loss, large_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(large_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max() + 1e-12)


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
    def step(loss, finite=True):
        return training.Metrics(np.float32(loss), np.float32(1), np.bool_(finite))

    calm = guard.LossGuard()
    for loss in (2.0, 2.5, 1.8, 3.5, 0.01, 0.02):
        calm.check(1, step(loss))
    assert guard.LossGuard(0.01).check(1, step(1.5)) is None  # a noisy end is no explosion
    with pytest.raises(guard.DivergedError, match="step 7: the loss is 9, over 6"):
        guard.LossGuard(2.0).check(7, step(9.0))
    with pytest.raises(guard.DivergedError, match="the loss is not finite"):
        calm.check(7, step(np.nan, finite=False))
    with pytest.raises(guard.DivergedError, match="the gradient or the updated adapter is not"):
        calm.check(7, step(1.0, finite=False))


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


@pytest.mark.slow
def test_runs_as_a_script():
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "finetune.py", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--accumulate" in result.stdout
