import json
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import ops
from benchmarks.ops import compose

QUICK = ("--quick", "--device", "cpu")


def run(level: str, folder: Path, *only: str) -> tuple[int, dict]:
    patterns = [word for pattern in only for word in ("--only", pattern)]
    code = command.main([level, "--out", str(folder), *QUICK, "--commit", "abc", *patterns])
    return code, json.loads((folder / f"{level}.json").read_text())


def test_ops_measures_every_operator_in_both_frameworks(tmp_path: Path) -> None:
    code, report = run("ops", tmp_path, "norm 64×48", "copy", "compose 3×64", "backward,")
    failures = [m for m in report["measurements"] if m["failed"]]
    assert (code, failures) == (0, [])
    assert report["passed"]
    assert report["environment"]["commit"] == "abc"
    # Nothing of this is worth quoting, and it says so.
    assert (report["wall_only"], report["quick"], report["ceilings"]) == (True, True, None)
    found = {(m["group"], m["framework"], m["variant"]) for m in report["measurements"]}
    assert ("compose", "jax", "mosaic") in found
    assert ("compose", "torch", "triton") in found
    assert ("backward, d_base", "jax", "mosaic") in found
    assert ("norm", "torch", "the paper's") in found
    assert all(m["device"] is None and m["wall"]["median"] > 0 for m in report["measurements"])
    assert (tmp_path / "ops-compose-speedup.png").exists()


def test_ops_has_the_paper_s_shapes() -> None:
    works = list(compose.works("cuda", quick=False))
    assert len(works) == 20 * 5
    assert len(list(ops.works("cuda", quick=False))) > len(works)


def test_a_wrong_result_is_caught_and_its_speedup_withheld(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compose.torch_forward

    def wrong(base, *arguments, **options):
        y, inner = right(base, *arguments, **options)
        return y * 1.02, inner

    monkeypatch.setattr(compose, "torch_forward", wrong)
    code, report = run("ops", tmp_path, "compose 3×64*eager", "compose 3×64 jax xla")
    assert code == 1
    assert not report["passed"]
    verdicts = {m["variant"]: m["check"]["passed"] for m in report["measurements"]}
    assert verdicts == {"xla": True, "eager": False}
    assert all(entry["withheld"] for entry in report["speedups"])
    assert "RED compose 3×64 torch eager" in (tmp_path / "ops.txt").read_text()


def test_a_failing_variant_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(compose, "torch_forward", broken)
    code, report = run("ops", tmp_path, "compose 3×64*eager", "compose 3×64 jax xla")
    assert code == 1
    failed = {m["variant"]: m["failed"] for m in report["measurements"]}
    assert failed == {"xla": "", "eager": "RuntimeError: out of memory"}


def test_layer_measures_forward_and_backward(tmp_path: Path) -> None:
    code, report = run(
        "layer", tmp_path, "*jax LoRA", "*jax DoRA", "*torch_dora", "*PEFT DoRA, def"
    )
    failures = [m for m in report["measurements"] if m["failed"]]
    assert (code, failures) == (0, [])
    groups = {m["group"] for m in report["measurements"]}
    assert groups == {"layer forward", "layer forward+backward"}
    cached = {m["variant"] for m in report["measurements"] if m["cached"]}
    assert "DoRA, norm kept" in cached
    assert {e["over"] for e in report["speedups"]} == {
        "the best jax LoRA",
        "torch PEFT DoRA, defaults",
    }


def test_quick_runs_are_kept_out_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["ops", "--out", str(command.RESULTS / "new"), *QUICK])
    assert "nothing worth keeping" in capsys.readouterr().err


def test_a_missing_gpu_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["ops", "--out", str(tmp_path), "--device", "cuda"])
    assert "no GPU" in capsys.readouterr().err


def test_only_what_is_asked_for_is_measured(tmp_path: Path) -> None:
    _, report = run("ops", tmp_path, "copy*torch")
    (measurement,) = report["measurements"]
    assert (measurement["framework"], measurement["variant"]) == ("torch", "eager")
