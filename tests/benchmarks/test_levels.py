"""The levels run as the README writes it, on tiny shapes and without a GPU."""

import dataclasses
from pathlib import Path

import jax
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import against, layer, model, ops, results, tune
from benchmarks.kernels import KERNELS
from benchmarks.measure import Bench, measure
from benchmarks.model import jax_model, torch_model
from benchmarks.model.protocol import COMPARED, KINDS, Protocol
from benchmarks.ops import compose
from benchmarks.report import Report
from benchmarks.worker import ROOT, Deadline, Worker, WorkerError

QUICK = ("--quick", "--device", "cpu")
BY_LABEL = {kind.label: kind for kind in KINDS}
CPU = {"card": "CPU", "device": "cpu"}


def run(level: str, folder: Path, *only: str) -> tuple[int, dict, list[dict]]:
    patterns = [word for pattern in only for word in ("--only", pattern)]
    code = command.main([level, "--out", str(folder), *QUICK, "--commit", "abc", *patterns])
    return code, *results.read(folder / f"{level}.jsonl")


def test_ops_measures_operators_in_both_frameworks(tmp_path: Path, capsys) -> None:
    code, header, rows = run("ops", tmp_path, "norm 64×48*jax f", "copy", "backward,*[xe]*")
    assert (code, [row for row in rows if row.get("failed")]) == (0, [])
    assert (header["kind"], header["level"], header["quick"]) == ("benchmark", "ops", True)
    assert header["environment"]["commit"] == "abc"
    found = {(row["group"], row["framework"], row["variant"]) for row in rows}
    assert {("backward, d_base", "jax", "xla"), ("backward, d_base", "torch", "eager")} <= found
    assert all(row["wall"]["median"] > 0 for row in rows if not row.get("refused"))
    # Said before anything is measured.
    assert "times mean nothing" in capsys.readouterr().out.partition("jax xla")[0]


def test_ops_has_the_paper_s_shapes() -> None:
    works = list(compose.works("cuda", quick=False))
    assert len(works) == 20 * 5
    assert len(list(ops.works("cuda", quick=False))) > len(works)


@pytest.mark.parametrize("wrong", [True, False])
def test_what_is_wrong_or_fails_is_caught(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compose.torch_ops.compose

    def broken(*arguments, **options):
        if not wrong:
            raise RuntimeError("out of memory")
        return right(*arguments, **options) * 1.02

    monkeypatch.setattr(compose.torch_ops, "compose", broken)
    code, _, rows = run("ops", tmp_path, "compose 3×64*eager", "compose 3×64 jax xla")
    assert code == 1
    xla, eager = rows
    assert xla["check"]["passed"]
    assert eager.get("failed") == (None if wrong else "RuntimeError: out of memory")
    assert wrong != ("check" not in eager)


def test_layer_measures_forward_and_backward(tmp_path: Path) -> None:
    code, _, rows = run("layer", tmp_path, "*jax LoRA (", "*jax DoRA, norm k*(", "*PEFT DoRA, def")
    assert (code, [row for row in rows if row.get("failed")]) == (0, [])
    assert {row["group"] for row in rows} == {"layer forward", "layer forward+backward"}
    assert {row["variant"] for row in rows if row.get("cached")} == {"DoRA, norm kept (no Triton)"}


def test_tune_has_every_kernel_with_its_candidates() -> None:
    works = list(tune.works("cuda", quick=False))
    assert len(works) == sum(len(kernel.shapes) for kernel in KERNELS.values())
    (first, *_) = tune.works("cpu", quick=True)
    xla, own, candidate = first().variants
    assert (xla.name, own.name) == ("xla", "mosaic, chosen: no")
    assert candidate.config
    assert measure(Bench.on("cpu", True), first(), own).correct


def test_quick_runs_are_kept_out_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["ops", "--out", str(command.RESULTS / "new"), *QUICK])
    assert "nothing worth keeping" in capsys.readouterr().err


def test_a_missing_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["ops", "--device", "cuda"])
    assert "no GPU" in capsys.readouterr().err


def test_two_checkouts_are_measured_in_turns() -> None:
    assert "holds no jax_dora" in against.check(ROOT / "docs")
    assert "this very checkout" in against.check(ROOT)
    report = Report("layer", CPU)
    spec = {"level": "layer", "device": "cpu", "quick": True}
    against.run(report, ROOT, spec | {"only": ["layer forward 24*kept"]}, (), 300)
    here, there = report.measurements
    assert (here.state, there.state) == ("here", "there")
    assert here.correct
    assert here.wall.samples == against.ROUNDS
    assert set(layer.COMPARED) >= {here.label}


def test_a_process_that_dies_or_is_late_is_named() -> None:
    spec = {"level": "model", "device": "cpu", "quick": True, "kind": {"no": "kind"}}
    with Worker(spec, Deadline(100)) as worker, pytest.raises(WorkerError, match="tasks"):
        worker.ask("measure")
    with Worker(spec, Deadline(0.5)) as worker, pytest.raises(TimeoutError, match="stopped after"):
        worker.ask("measure")
    report = Report("model", CPU)
    model.run(report, "cpu", True, [BY_LABEL["jax base (no Triton)"]], 0)
    assert "no time was left" in report.measurements[0].refused


def test_kinds_are_named_once_and_chosen_by_label_and_task() -> None:
    assert len(BY_LABEL) == len(KINDS)
    chosen = [(k.label, k.tasks) for k in model.chosen(["jax LoRA"], ["gradient"])]
    assert chosen == [("jax LoRA (no Triton)", ("gradient",)), ("jax LoRA", ("gradient",))]
    assert [(k.label, k.tasks) for k in model.chosen([], [], compared=True)] == list(COMPARED)
    assert set(model.EFFORT) == {task for kind in KINDS for task in kind.tasks}


@pytest.mark.parametrize("label", ["jax LoRA (no Triton)", "torch torch_dora, norm kept"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_model_s_gradient_is_measured(label: str) -> None:
    kind = dataclasses.replace(BY_LABEL[label], tasks=("gradient",))
    # JAX's own attention does not promote strictly.
    with jax.numpy_dtype_promotion("standard"):
        (work,) = model.works(kind, "cpu", quick=True)
        found = measure(Bench.on("cpu", True), work, work.variants[0])
    assert found.correct, found
    assert found.label == label


def test_the_check_sees_a_wrong_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = torch_model.Dense.forward
    monkeypatch.setattr(torch_model.Dense, "forward", lambda self, x: 1.05 * dense(self, x))
    kind = BY_LABEL["torch torch_dora"]
    assert not torch_model._check(kind, Protocol.quick(), "cpu").passed
    assert jax_model.TASKS
