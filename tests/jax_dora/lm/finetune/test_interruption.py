"""Runs that something stops: what they leave, and how they are resumed."""

import datetime
import json
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dora_common.disk import locked
from jax_dora.lm.finetune import packing, stopping, training
from jax_dora.lm.finetune.checkpoints import Checkpoints
from jax_dora.lm.finetune.results import Result
from jax_dora.lm.finetune.run import Run
from tests.jax_dora.lm.chat_templates import CHATML, TALK
from tests.jax_dora.lm.finetune.runs import (
    OPTIONS,
    assert_one_line,
    finetune,
    metrics,
    plan_of,
    same_adapter,
    told,
    without_speed,
)
from tests.tables import thinned


def interrupt_at(monkeypatch, step):
    original = packing.batch

    def batch(rows, place, *rest):
        if place == step - 1:
            signal.raise_signal(signal.SIGINT)
        return original(rows, place, *rest)

    monkeypatch.setattr(packing, "batch", batch)


@pytest.mark.slow
def test_ctrl_c_and_resume_are_bitwise_the_same_run(
    finished, command, monkeypatch, capsys, tmp_path
):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        assert finetune(command) == 130
    assert "Interrupted after step 3. Step 3 is saved" in told(capsys)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    assert not (tmp_path / "run" / "adapter").exists()

    assert finetune(command) == 2
    assert "already contains a run; pass --resume" in told(capsys)
    assert finetune([*command, "--resume", "--rank", "5"]) == 2
    assert "--rank was 4 and is 5" in told(capsys)

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
    assert "Step 2 is saved; start the run again with --resume to continue" in output
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps() == [2]
    assert checkpoints.facts(2)["settings"]["rank"] == 4
    monkeypatch.setattr(training, "update", original)
    assert finetune([*command, "--resume"]) == 0


def test_guard():
    def check(one, loss, finite=True, base=2.5):
        metrics = training.Metrics(np.float32(loss), np.float32(1), np.bool_(finite))
        one.check(7, metrics, lambda: base)

    calm = stopping.DivergenceCheck()
    for loss in (2.0, 2.5, 1.8, 3.5, 0.01, 0.02):
        check(calm, loss)
    check(stopping.DivergenceCheck(0.01), 1.5)  # a noisy end is no explosion
    with pytest.raises(
        stopping.DivergedError, match="step 7: the loss has diverged: it is 9, above the limit of 6"
    ):
        check(stopping.DivergenceCheck(2.0), 9.0)
    with pytest.raises(stopping.DivergedError, match=r"the loss is not finite .* rows is 2\.5$"):
        check(calm, np.nan, finite=False)
    with pytest.raises(stopping.DivergedError, match="rows is nan, not finite either: check its"):
        check(calm, np.inf, finite=False, base=np.nan)
    with pytest.raises(stopping.DivergedError, match="the gradient or the updated adapter is not"):
        check(calm, 1.0, finite=False)


def test_second_ctrl_c_interrupts():
    # What started these tests may have told its children to ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stopping.Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            assert interruption.requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


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
    assert f"{largest} is damaged" in output
    assert "Continuing after step 4 of 6" in output
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
    other = tmp_path / "other"
    shutil.copytree(finished / "tiny-model", other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert finetune([*command, "--resume", "--model", str(other)]) == 2
    assert "expected the settings of the checkpoint, but weights was " in told(capsys)
    assert finetune([*command, "--resume"]) == 0
    assert "The run had 4 steps and now has 6" in told(capsys)
    assert finetune([*command, "--output", str(tmp_path / "whole")]) == 0
    assert without_speed(metrics(tmp_path / "run")) == without_speed(metrics(tmp_path / "whole"))
    same_adapter(tmp_path / "run", tmp_path / "whole")


def test_a_chat_template_that_writes_the_date_writes_that_of_the_start(
    inputs, tmp_path, monkeypatch
):
    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(1)

    model, data = shutil.copytree(inputs[1], tmp_path / "model"), tmp_path / "data.jsonl"
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + CHATML)
    data.write_text(json.dumps({"messages": TALK}))
    flags = ["--model", str(model), "--data", str(data), "--output", str(tmp_path / "run")]
    plan = plan_of(flags)
    run = Run(plan)
    run.done = 1
    run._save()
    monkeypatch.setattr(datetime, "datetime", Tomorrow)
    assert plan_of([*flags, "--resume"]).fixed == plan.fixed
    other = plan_of([*flags, "--output", str(tmp_path / "other")])
    assert other.fixed != plan.fixed


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
    "process": (
        jax.errors.JaxRuntimeError("INTERNAL: Gloo failed: closed\nlong trace"),
        1,
        "Stopped: another process has ended or is lost (INTERNAL: Gloo failed: closed). ",
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

    monkeypatch.setattr(packing, "batch", fail)
    assert finetune(command) == status
    assert_one_line(capsys, message)
    # The corrected command is accepted.
    done = Result([], None, None, is_interrupted=False)
    monkeypatch.setattr(Run, "train", lambda _: done)
    assert finetune(command) == 0


def test_interrupted_while_it_starts():
    """Before anything is imported that takes long."""
    code = (
        "import signal, sys, jax_dora_command\n"
        "sys.modules['jax_dora.lm.commands'] = type('M', (), {\n"
        "  'main': lambda: signal.raise_signal(signal.SIGINT)})\n"
        "jax_dora_command.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (130, "Interrupted.", "")
