"""Two processes that train one adapter."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.jax_dora.lm.finetune.runs import assert_one_line, finetune, last_of, metrics

ROOT = Path(__file__).parents[4]
ON_CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
OPTIONS = (
    *("--rank", "2", "--length", "24", "--batch", "2", "--accumulate", "1", "--dropout", "0.1"),
    *("--target", "model/layers/mlp/down_proj", "--learning-rate", "1e-2", "--samples", "0"),
    *("--schedule", "constant"),
)


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def is_free(port):
    with socket.socket() as one:
        return one.connect_ex(("localhost", port)) != 0


def started(command, environments, last=()):
    """Returns a process for each of the environments, the last one with more flags."""
    meeting = ["--coordinator", f"localhost:{free_port()}", "--processes", str(len(environments))]
    flags = [*command, *meeting, "--process"]
    each = [[*flags, str(i)] for i in range(len(environments))]
    each[-1] += last
    return [
        subprocess.Popen(
            [sys.executable, "-m", "jax_dora", "finetune", *last_of(flags)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for flags, environment in zip(each, environments, strict=True)
    ]


def start(command, environments, last=()):
    """Returns (exit status, output) of a process for each of the environments."""
    running = started(command, environments, last)
    outputs = [one.communicate()[0] for one in running]
    return [(one.returncode, output) for one, output in zip(running, outputs, strict=True)]


def losses(run):
    return [(line["step"], line["loss"]) for line in metrics(run)]


def assert_one_run(finished, command, tmp_path, environment):
    """Of two processes that took two steps, which one process goes on with."""
    (status, told), (other_status, other_told) = finished
    assert (status, other_status) == (0, 0), told + other_told
    assert told.count("Saved the adapter to") == 1
    assert "rows of 24 tokens" in told
    assert "rows" not in other_told
    assert "adapter" not in other_told
    run = tmp_path / "run"
    assert sorted(one.name for one in (run / "checkpoints").iterdir()) == ["2"]
    assert finetune([*command, "--steps", "3", "--resume"]) == 0
    command[command.index("--output") + 1] = str(tmp_path / "alone")
    # In a process of its own, where no test draws for JAX.
    assert start([*command, "--steps", "3"], [environment])[0][0] == 0
    np.testing.assert_allclose(losses(run), losses(tmp_path / "alone"), rtol=1e-5)


@pytest.mark.slow
def test_two_processes_are_one_run(inputs, tmp_path):
    command = [*inputs, *OPTIONS, "--output", str(tmp_path / "run")]
    finished = start([*command, "--steps", "2"], [ON_CPU] * 2)
    assert_one_run(finished, command, tmp_path, ON_CPU)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["learning_rate", "data"])
def test_processes_that_were_given_other_flags_or_data_are_stopped(what, inputs, tmp_path):
    """They would train different adapters as if these were one."""
    other = tmp_path / "data.jsonl"
    other.write_text('{"prompt": "1+2=", "completion": "3"}\n')
    last = {"learning_rate": ("--learning-rate", "1e-3"), "data": ("--data", str(other))}[what]
    command = [*inputs, *OPTIONS, "--steps", "2", "--output", str(tmp_path / "run")]
    (status, told), (other_status, other_told) = start(command, [ON_CPU] * 2, last)
    assert (status, other_status) == (2, 2), told + other_told
    assert "another process has other settings than this one" in told
    assert f"process 1 has other settings than process 0: {what} is " in other_told
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def kill(victim, command, steps, run):
    """Kills one of two processes after so many steps. Returns the other's exit status, its output,
    and the seconds that it has lived on."""
    running = started(command, [ON_CPU] * 2)
    try:
        file = run / "metrics.jsonl"
        while not file.is_file() or len(file.read_bytes().splitlines()) < steps:
            assert all(one.poll() is None for one in running)
            time.sleep(0.01)
        running[victim].kill()
        start = time.monotonic()
        told = running[1 - victim].communicate(timeout=60)[0]
        return running[1 - victim].returncode, told, time.monotonic() - start
    finally:
        for one in running:
            with one:
                one.kill()


@pytest.mark.slow
def test_when_one_process_is_killed_the_other_ends_and_the_run_goes_on(inputs, tmp_path):
    run, alone, whole = (tmp_path / name for name in ("run", "alone", "whole"))
    flags = [*inputs, *OPTIONS, "--steps", "60", "--checkpoint-every", "5", "--output"]
    command = [*flags, str(run)]
    for victim, steps in ((1, 8), (0, 24)):
        status, told, seconds = kill(victim, command, steps, run)
        assert seconds < 30
        assert "Traceback" not in told
        # JAX may abort the process before it has printed an error of its own.
        assert status in (1, -signal.SIGABRT), told
        if status == 1:
            last = told.strip().splitlines()[-1]
            saved = max(int(one.name) for one in (run / "checkpoints").glob("[0-9]*"))
            assert last.startswith("Stopped: another process has ended or is lost ("), told
            assert f"Step {saved} is saved; start the run again with --resume" in last
        command = [*flags, str(run), "--resume"]
    shutil.copytree(run, alone)
    for finished in (start(command, [ON_CPU] * 2), start([*flags, str(whole)], [ON_CPU] * 2)):
        assert [status for status, _ in finished] == [0, 0], finished
    assert len(losses(whole)) == 60
    assert losses(run) == losses(whole)
    adapters = [one / "adapter" / "adapter_model.safetensors" for one in (run, whole)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    assert finetune([*flags, str(alone), "--resume"]) == 0
    np.testing.assert_allclose(losses(alone), losses(whole), rtol=1e-5)


@pytest.mark.gpus
def test_two_processes_of_one_gpu_are_one_run(inputs, tmp_path):
    command = [*inputs, *OPTIONS, "--output", str(tmp_path / "run")]
    environments = [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(2)]
    finished = start([*command, "--steps", "2"], environments)
    assert_one_run(finished, command, tmp_path, environments[0])


JOIN = """
from jax_dora.lm.finetune import processes
processes.join("auto", None, None)
import jax
print(jax.process_index(), jax.process_count(), jax.device_count(), processes.any_process(True))
"""


@pytest.mark.slow
def test_slurm_says_who_takes_part():
    """By the variables of a step of a job, whose number makes the port."""
    job = next(job for job in range(4096) if is_free(61440 + job))
    common = {
        **os.environ,
        **{"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        **{"SLURM_JOB_ID": str(job), "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"},
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN],
            env={**common, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    told = [one.communicate(timeout=120)[0].splitlines()[-1] for one in running]
    assert told == ["0 2 2 True", "1 2 2 True"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "2"], "--processes or --process is given without HOST:PORT"),
        (["--coordinator", "auto", "--process", "0"], "is given without HOST:PORT"),
        (
            ["--coordinator", "localhost:1", "--process", "0"],
            "--process 0, --processes None: expected --coordinator HOST:PORT",
        ),
        (
            ["--coordinator", "localhost:1", "--processes", "2", "--process", "2"],
            "--process 2, --processes 2: expected --coordinator HOST:PORT",
        ),
    ],
)
def test_processes_that_cannot_meet(options, message, inputs, tmp_path, capsys):
    assert finetune([*inputs, *options, "--output", str(tmp_path / "run")]) == 2
    assert_one_line(capsys, message)
    assert jax.process_count() == 1
