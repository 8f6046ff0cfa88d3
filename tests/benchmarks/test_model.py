import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import __main__ as command
from benchmarks import model
from benchmarks.model import jax_model, torch_model, worker
from benchmarks.model.protocol import VARIANTS, Protocol

PROTOCOL = Protocol.quick()
BY_LABEL = {variant.label: variant for variant in VARIANTS}


@pytest.fixture(autouse=True)
def as_users_run_it() -> Iterator[None]:
    """JAX's own attention does not promote strictly."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_labels_are_unique() -> None:
    assert len(BY_LABEL) == len(VARIANTS)


# PEFT asks for a property under the name that transformers is about to drop.
ignore_peft_s_names = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@ignore_peft_s_names
@pytest.mark.parametrize("label", ["torch torch_dora, norm kept", "torch PEFT LoRA, bf16"])
def test_torch_variants_agree_with_fp32(label: str) -> None:
    check = torch_model.side(BY_LABEL[label], PROTOCOL, "cpu").check()
    assert check.passed, check


def test_the_check_sees_a_wrong_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    right = jax_model.jax_dora.DoRALinear.norm
    monkeypatch.setattr(jax_model.jax_dora.DoRALinear, "norm", lambda self: 1.05 * right(self))
    monkeypatch.setattr(jax_model, "_build", _with_unstrayed_magnitude(jax_model._build))
    assert not jax_model.side(BY_LABEL["jax DoRA (no Triton)"], PROTOCOL, "cpu").check().passed


def _with_unstrayed_magnitude(build):
    def built(*arguments):
        made = build(*arguments)
        # The magnitude was initialised by the same wrong norm, which would cancel.
        for _, module in jax_model.nnx.iter_modules(made):
            if isinstance(module, jax_model.jax_dora.DoRALinear):
                module.magnitude[...] = module.magnitude[...] / 1.05
        return made

    return built


@ignore_peft_s_names
def test_flops_are_those_of_the_products() -> None:
    built = torch_model.side(BY_LABEL["torch PEFT LoRA, bf16"], PROTOCOL, "cpu").tasks
    counted = {}
    for task, step, _ in built:
        with FlopCounterMode(display=False) as counter:
            step()
        operators = counter.get_flop_counts()["Global"].items()
        # Not every torch counts attention, and none counts the half of it that is causal.
        counted[task] = sum(n for operator, n in operators if "attention" not in str(operator))
    attention = 2 * PROTOCOL.layers * PROTOCOL.tokens**2 * PROTOCOL.heads * PROTOCOL.head_dim
    # torch stops a layer's second forward pass short of its last product, lora_b of down_proj.
    last = 2 * PROTOCOL.layers * PROTOCOL.tokens * PROTOCOL.rank * PROTOCOL.hidden
    expected = {
        "inference": PROTOCOL.flops("inference", "LoRA") - attention,
        "gradient": PROTOCOL.flops("gradient", "LoRA") - attention * (2 + 2.5) - last,
    }
    # Rotary angles are a product in some versions of transformers.
    angles = PROTOCOL.tokens * PROTOCOL.head_dim
    for task, products in expected.items():
        assert counted[task] - products in (0, angles)


def test_a_worker_s_measurements_come_back(tmp_path: Path) -> None:
    only = ("--only", "jax DoRA, norm kept")
    code = command.main(["model", "--out", str(tmp_path), "--quick", "--device", "cpu", *only])
    report = json.loads((tmp_path / "model.json").read_text())
    assert [m["failed"] for m in report["measurements"]] == [""] * 3
    assert code == 0
    groups = [m["group"] for m in report["measurements"]]
    assert groups == ["model inference", "model gradient", "model accumulation"]
    for measurement in report["measurements"]:
        assert measurement["check"]["passed"]
        assert measurement["peak_bytes"] > 0
        assert measurement["wall"]["median"] > 0


def test_only_the_tasks_asked_for_are_measured(tmp_path: Path) -> None:
    chosen = ("--only", "jax base", "--only", "jax LoRA (no", "--task", "inference")
    code = command.main(["model", "--out", str(tmp_path), "--quick", "--device", "cpu", *chosen])
    report = json.loads((tmp_path / "model.json").read_text())
    assert code == 0
    found = [(m["variant"], m["group"]) for m in report["measurements"]]
    assert found == [
        ("LoRA (no Triton)", "model inference"),
        ("base (no Triton)", "model inference"),
    ]


def test_an_interrupt_stops_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, pid = tmp_path / "python", tmp_path / "pid"
    slow.write_text(f"#!/bin/sh\necho $$ >{pid}\nsleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(model.sys, "executable", str(slow))
    monkeypatch.setattr(subprocess.Popen, "communicate", _interrupted(pid))
    arguments = ["--quick", "--device", "cpu", "--only", "jax base*"]
    with pytest.raises(KeyboardInterrupt):
        command.main(["model", "--out", str(tmp_path), *arguments])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def _interrupted(pid: Path) -> Callable[..., Any]:
    """Of a worker that has written its number: Ctrl-C when first waited for."""
    communicate = subprocess.Popen.communicate
    interrupts = iter([KeyboardInterrupt])

    def interrupted(process: subprocess.Popen, *arguments: Any, **options: Any) -> Any:
        if "benchmarks.model.worker" in process.args and (interrupt := next(interrupts, None)):
            while not (pid.exists() and pid.read_text().strip()):
                time.sleep(0.01)
            raise interrupt
        return communicate(process, *arguments, **options)

    return interrupted


def test_a_worker_that_ends_early_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.sys, "executable", "/bin/true")
    arguments = ["--out", str(tmp_path), "--quick", "--device", "cpu", "--only", "jax base*"]
    assert command.main(["model", *arguments]) == 1
    report = json.loads((tmp_path / "model.json").read_text())
    assert report["measurements"][0]["failed"] == "its worker ended without it"


DIES_AFTER_ITS_FIRST_TASK = """#!/bin/sh
cat >"$4" <<END
[{"group": "model inference", "shape": {}, "framework": "jax", "variant": "x", "bytes": 1,
  "flops": 1}]
END
printf 'out of \\377memory\\n'
exit 1
"""


def test_what_a_dying_worker_has_not_measured_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = tmp_path / "python"
    dying.write_text(DIES_AFTER_ITS_FIRST_TASK)
    dying.chmod(0o755)
    monkeypatch.setattr(model.sys, "executable", str(dying))
    arguments = ["--out", str(tmp_path), "--quick", "--device", "cpu", "--only", "jax LoRA (no"]
    assert command.main(["model", *arguments]) == 1
    report = json.loads((tmp_path / "model.json").read_text())
    found = {m["group"]: m["failed"] for m in report["measurements"]}
    assert found == {
        "model inference": "",
        "model gradient": "out of \ufffdmemory",
        "model accumulation": "out of \ufffdmemory",
    }


def test_a_worker_that_is_stopped_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\necho checks a few layers since 3 s\nsleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(model.sys, "executable", str(slow))
    arguments = ["--quick", "--device", "cpu", "--only", "jax LoRA (no", "--seconds", "1"]
    begin = time.monotonic()
    assert command.main(["model", "--out", str(tmp_path), *arguments]) == 0
    report = json.loads((tmp_path / "model.json").read_text())
    assert [m["failed"] for m in report["measurements"]] == [""] * 3
    stopped = "stopped after 1 s (checks a few layers since 3 s)"
    assert all(stopped in m["refused"] for m in report["measurements"])
    assert time.monotonic() - begin < 30


def test_a_worker_that_dies_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model.sys, "executable", "/bin/false")
    arguments = ["--out", str(tmp_path), "--quick", "--device", "cpu", "--only", "jax base*"]
    assert command.main(["model", *arguments]) == 1
    report = json.loads((tmp_path / "model.json").read_text())
    assert report["measurements"][0]["failed"]


def test_variants_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    arguments = ["--quick", "--device", "cpu", "--only", "jax base*", "--seconds", "0"]
    assert command.main(["model", "--out", str(tmp_path), *arguments]) == 0
    report = json.loads((tmp_path / "model.json").read_text())
    assert "no time" in report["measurements"][0]["refused"]


def test_efforts_cover_every_task() -> None:
    assert set(worker.EFFORT) == {task for variant in VARIANTS for task in variant.tasks}
