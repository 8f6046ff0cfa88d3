"""Options and folders that the fine-tuning command refuses, and what it says."""

import json
import os
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import peft
import pytest
import torch
import transformers

import jax_dora
import jax_dora.lm.models as decoder
import jax_dora.peft
from jax_dora.lm.commands import main
from jax_dora.lm.finetune.tiny import byte_level_tokenizer
from parity import tolerances
from tests.jax_dora.lm.finetune.runs import FP8, OPTIONS, assert_one_line, finetune, told
from tests.tables import ci

ROOT = Path(__file__).parents[4]


# As the error shows them.
OUT_OF_RANGE = {
    "--rank": "0 -1 99999999999",
    "--alpha": "0.0 -1.0 nan inf 1e+308 1e-300",
    "--dropout": "1.0 -0.1 nan",
    "--length": "0",
    "--steps": "0 -1",
    "--epochs": "0.0 -1.0 inf nan 1e+300",
    "--batch": "0",
    "--accumulate": "0",
    "--learning-rate": "0.0 -1.0 nan 1e+39",
    "--warmup": "-1",
    "--weight-decay": "-0.1 inf",
    "--clip": "0.0 -1.0 nan",
    "--seed": "-1 4294967296",
    "--checkpoint-every": "0",
    "--eval-every": "0",
    "--keep": "0 -1",
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model or --data is missing"),
        (["--tiny", "--model", "x"], "--model and --tiny are both given"),
        (["--tiny", "--data", "missing.jsonl"], "--data missing.jsonl: expected a file"),
        (["--target", "nothing"], "--target 'nothing', matches no layer"),
        (
            ["--target", "model/embed_tokens", "--dropout", "0.1"],
            "--dropout 0.1: expected 0, since --target 'model/embed_tokens' matches only the",
        ),
        (["--target", ".*"], "the rules match modules or weights that cannot be adapted"),
        (["--tiny", "--target", "("], "--target '(': expected a regular expression"),
        (["--steps", "5", "--epochs", "2"], "--epochs 2.0: expected --steps or --epochs, not both"),
        (["--steps", "5", "--warmup", "5"], "--warmup 5: expected less than the run's 5 steps"),
        (["--model", "missing", "--data", str(ROOT / "README.md")], "config.json does not exist"),
        (["--activations", FP8], f"--activations is {FP8!r}, but the model is not quantised"),
        (["--tiny", "--activations", FP8], "is not quantised; expected --quantize '"),
        (["--activations", FP8, "--quantize", "nf4"], f"{FP8!r} with --quantize 'nf4'"),
        (["--tiny", "--gradients", FP8], f"--gradients is {FP8!r} and --activations None"),
        (["--tiny", "--gradients", "int8"], "--gradients: invalid choice: 'int8'"),
        (["--tiny", "--patience", "2"], "--patience 2: expected --eval-data as well"),
        (["--tiny", "--eval-every", "2"], "--eval-every 2: expected --eval-data as well"),
        (["--tiny", "--target", "nothing"], "matches no layer"),
        (["--tiny", "--merge", str(ROOT / "README.md" / "x")], "README.md is a file"),
        (["--tiny", "--merge="], "--merge '': expected a path"),
        (["--tiny", "--unknown"], "unrecognized arguments: --unknown"),
        *(
            (["--tiny", flag, value], f"{flag} {value}: expected a")
            for flag, values in OUT_OF_RANGE.items()
            for value in values.split()
        ),
    ],
)
def test_bad_options(options, message, inputs, tmp_path, capsys):
    if "--tiny" not in options and "--model" not in options and options:
        options = [*inputs, *options]
    run = tmp_path / "run"
    assert finetune([*options, "--output", str(run)]) == 2
    assert_one_line(capsys, message)
    assert not run.exists() or not list(run.iterdir())


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        *(("finetune --tiny", flag) for flag in ("--rank 4", "--length 8", "--target x")),
        *(("generate --prompt x", flag) for flag in ("--adapter x", "--model x", "--seed 0")),
        ("merge", "--adapter x"),
        ("inspect x", "--quantize nf4"),
        ("serve --model x", "--adapters x"),
    ],
)
def test_a_flag_that_is_given_twice(command, flag, tmp_path, monkeypatch, capsys):
    """Even with the same value, since a flag may be one of which several were meant."""
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), *flag.split(), *flag.split()]) == 2
    assert_one_line(capsys, f"argument {flag.split()[0]}: it is given twice; expected one value")


@pytest.mark.parametrize("missing", ["--data", "--eval-data"])
def test_one_of_several_files_that_is_missing(missing, inputs, tmp_path, capsys):
    command = [*inputs, missing, inputs[3], "missing.jsonl", "--output", str(tmp_path / "run")]
    assert finetune(command) == 2
    assert_one_line(capsys, f"{missing} missing.jsonl: expected a file; it does not exist")


@pytest.mark.parametrize("name", ["adapter", "best", "../run/checkpoints"])
def test_a_merged_model_in_a_folder_of_the_run_s_own(name, inputs, tmp_path, capsys):
    run = tmp_path / "run"
    assert finetune([*inputs, "--output", str(run), "--merge", str(run / name)]) == 2
    assert "it exists already, or is a folder of the run" in told(capsys)


def test_a_merged_model_where_nothing_can_be_written(inputs, tmp_path, monkeypatch, capsys):
    """Permissions would not stop tests that run as root."""
    parent, mkdir = tmp_path / "locked", os.mkdir
    parent.mkdir()

    def refuse(path, *arguments, **options):
        if Path(path).parent == parent:
            raise PermissionError(13, "Permission denied", str(path))
        return mkdir(path, *arguments, **options)

    command = [*inputs, "--output", str(tmp_path / "run"), "--dry-run", "--merge"]
    assert finetune([*command, str(parent / "a" / "merged")]) == 0
    assert not list(parent.iterdir())
    monkeypatch.setattr(os, "mkdir", refuse)
    assert finetune([*command, str(parent / "a" / "merged")]) == 2
    assert f"may write, but {parent} is not writable (Permission denied)" in told(capsys)


@pytest.mark.parametrize("name", ["", "best"])
def test_a_model_in_a_folder_of_the_run_s_own(name, inputs, tmp_path, capsys):
    run, model = tmp_path / "run", tmp_path / "run" / name
    shutil.copytree(inputs[1], model)
    files = sorted(run.rglob("*"))
    assert finetune([*inputs, "--model", str(model), "--output", str(run)]) == 2
    assert f"--output {run}: expected another folder than --model {model}" in told(capsys)
    assert sorted(run.rglob("*")) == files


@pytest.mark.parametrize(
    ("package", "extra"), [("matplotlib", "finetune"), ("tensorboardX", "tensorboard")]
)
def test_what_the_end_needs_is_asked_for_at_the_start(
    package, extra, inputs, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, package, None)
    assert finetune([*inputs, "--report-to", "tensorboard", "--output", str(tmp_path / "run")]) == 2
    assert f"{package} is not installed; run: pip install 'jax-dora[{extra}]'" in told(capsys)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", [], "config.json holds a list; expected a JSON object"),
        ("config.json", {"hidden_size": "a"}, "hidden_size 'a'; expected a positive integer"),
        ("config.json", {"vocab_size": None}, "vocab_size None; expected a positive integer"),
        ("config.json", {"eos_token_id": -1}, "eos_token_id [-1]; expected a token id"),
        ("config.json", {"eos_token_id": True}, "eos_token_id [True]; expected a token id"),
        ("config.json", {"rms_norm_eps": None}, "config.json has a field of an unexpected type"),
        ("config.json", {"rope_scaling": 3}, "config.json has a field of an unexpected type"),
        (
            "config.json",
            {"quantization_config": "x"},
            "quantization_config 'x', a format that cannot be read",
        ),
        (
            "config.json",
            {"max_position_embeddings": "x"},
            "embeddings 'x'; expected an integer",
        ),
        ("config.json", {"max_position_embeddings": True}, "embeddings True; expected an integer"),
        ("config.json", {"max_position_embeddings": 0}, "embeddings 0; expected an integer"),
        ("generation_config.json", [], "generation_config.json holds a list"),
        ("generation_config.json", {"eos_token_id": "x"}, "n_config.json has eos_token_id ['x']"),
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
    assert_one_line(capsys, message)


@pytest.mark.parametrize("flag", ["--data", ci("--eval-data")])
def test_an_example_longer_than_the_model_s_positions(flag, inputs, tmp_path, capsys):
    """Packed rows may be longer: positions begin again in every example."""
    long = tmp_path / "long.jsonl"
    command = [*inputs, flag, str(long), "--length", "1024", "--output", str(tmp_path / "run")]
    for size, status in ((511, 0), (512, 0), (513, 2)):
        long.write_text(json.dumps({"text": "x" * size}) + '\n{"text": "y"}\n')
        assert finetune([*command, "--dry-run"]) == status
    assert "an example of 513 tokens; expected at most config.json's" in told(capsys)
    assert finetune([*command, "--length", "512", "--dry-run"]) == 0
    assert "1 split into rows, 0 truncated to 512 tokens" in told(capsys)
    assert finetune([*command, "--length", "512", "--dry-run", "--split", "none"]) == 0
    assert "0 split into rows, 1 truncated to 512 tokens" in told(capsys)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["model/embed_tokens", "model/(embed_tokens|.*/o_proj)"])
def test_an_embedding_beside_a_tied_head(finished, command, target, caplog, tmp_path):
    """Trained and merged as in PEFT, where the head stays as it is."""
    command = [*command, "--target", target, "--steps", "3", "--dropout", "0"]
    assert finetune([*command, "--merge", str(tmp_path / "merged")]) == 0
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
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        after = merged(torch.tensor(tokens)).logits.numpy()
    peak = max(1.0, np.abs(expected).max())
    for logits in (found, after):
        assert np.abs(logits - expected).max() <= tolerances.caps.OPERATOR_FP32_MAX_ABS * peak
