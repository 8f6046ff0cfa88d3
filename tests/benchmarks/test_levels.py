"""The levels run as the README writes it, on tiny shapes and without a GPU."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import (
    against,
    bank,
    model,
    ops,
    quantised,
    results,
    step_table,
    torch_serve,
    torch_step,
    tune,
)
from benchmarks.kernels import KERNELS
from benchmarks.measure import Settings, measured
from benchmarks.model.protocol import KINDS
from benchmarks.model.protocol import QUICK as QUICK_MODEL
from benchmarks.ops import compose

QUICK = ("--quick", "--device", "cpu")
GIVEN = ("--torch", "--table")
BY_LABEL = {kind.label: kind for kind in KINDS}


def run(level: str, folder: Path, *only: str) -> tuple[int, dict, list[dict]]:
    patterns = [word for pattern in only for word in ("--only", pattern)]
    given = ["--out", str(folder), *QUICK, "--commit", "abc", *patterns]
    # JAX's own attention promotes bf16.
    with jax.numpy_dtype_promotion("standard"):
        code = command.main([*level.split(), *given])
    return code, *results.read(folder / f"{level.replace(' --', '_')}.jsonl")


@pytest.mark.slow
def test_ops_measures_operators_in_both_frameworks(tmp_path: Path, capsys) -> None:
    code, header, rows = run("ops", tmp_path, "norm 64×48*jax f", "backward,*[xe]*")
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
    assert len(works) == 20 * 3
    assert len(list(ops.works("cuda", Settings(ops.works)))) > len(works)


@pytest.mark.slow
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


@pytest.mark.slow
def test_layer_measures_forward_and_backward(tmp_path: Path) -> None:
    code, _, rows = run("layer", tmp_path, "*jax LoRA (", "*jax DoRA, norm k*(", "*PEFT DoRA, def")
    assert (code, [row for row in rows if row.get("failed")]) == (0, [])
    assert {row["group"] for row in rows} == {"layer forward", "layer forward+backward"}


@pytest.mark.slow
def test_bank_measures_every_kind_and_loading(tmp_path: Path) -> None:
    code, header, rows = run("bank", tmp_path)
    assert (code, header["level"]) == (0, "bank")
    loads = [(row["rank"], row["kind"]) for row in rows if row["task"] == "load"]
    assert loads == [(rank, kind) for rank in bank.TINY.ranks for kind in ("first", "again")]
    found = [row for row in rows if row["task"] != "load"]
    first = [kind for kind in bank.TINY.kinds if kind != "DoRA mosaic"]
    growth = (len(bank.TINY.ranks) + len(bank.TINY.adapters)) * bank.GROWING
    # One row with Zipf's adapters and alone, three rows by XLA too, and prompts.
    expected = [*4 * first, *growth]
    assert [row["kind"] for row in found] == expected
    for row in found:
        assert row["bound"] > 1 or row["kind"] == "base"
        assert row["ms"] > 0
        compared = row["kind"] in bank.REFERENCES and row["mix"] != "growth"
        assert ("difference" in row) == compared
    # More adapters than slots are loaded again and again.
    loads = {row["adapters"]: row["loads"] for row in found if "adapters" in row}
    assert loads[2] == 0 < loads[5]


@pytest.mark.slow
def test_serve_measures_every_kind(tmp_path: Path) -> None:
    code, header, rows = run("serve", tmp_path)
    assert (code, header["level"]) == (0, "serve")
    found = [(row["kind"], row["adapters"]) for row in rows]
    assert found == [("base", 0), ("DoRA", 1), ("LoRA", 1), ("DoRA", 3), ("LoRA", 3)]
    for row in rows:
        assert row["answers"] >= 3
        assert row["tokens_per_s"] > 0
        assert 0 < row["first_token_ms"] <= row["first_token_p90_ms"]
        # More adapters than slots are loaded again and again; one is loaded once at most.
        assert row["loads"] >= (3 if row["adapters"] == 3 else 0)
        assert row["loads"] <= 1 or row["adapters"] == 3


@pytest.mark.slow
def test_sizes_measures_a_trained_and_a_frozen_layer(tmp_path: Path) -> None:
    code, header, rows = run("sizes", tmp_path)
    assert (code, header["level"]) == (0, "sizes")
    found = [(row["task"], row["kind"]) for row in rows]
    assert found == [(t, k) for t in ("decode", "gradient") for k in ("LoRA", "DoRA")]
    for row in rows:
        assert row["p10_us"] <= row["us"] <= row["p90_us"]
        assert ("over_lora" in row) == (row["kind"] == "DoRA")


@pytest.mark.slow
def test_quantised_measures_every_format_and_a_step(tmp_path: Path) -> None:
    code, _, rows = run("quantised", tmp_path)
    assert (code, [row for row in rows if row.get("failed")]) == (0, [])
    assert [row["qtype"] for row in rows if row["work"] == "norm"] == list(quantised.FORMATS)
    few = [row for row in rows if row["work"] == "few rows" and "implementation" not in row]
    assert [row["qtype"] for row in few] == list(quantised.FORMATS)
    projections = [row for row in rows if row["work"] == "projection"]
    assert len(projections) == 8
    assert sum("activations" in row for row in projections) == 4
    (step,) = (row for row in rows if row["work"] == "step")
    assert step["peak_bytes"] > step["temp_bytes"] > 0


@pytest.mark.slow
def test_quality_measures_both_models_and_both_long_runs(tmp_path: Path) -> None:
    code, _, rows = run("quality", tmp_path)
    assert code == 0
    assert [row["model"] for row in rows] == ["encoder"] * 2 + ["decoder"] * 5
    for row in rows[:2] + rows[3:5]:
        assert 0 < row["kl"] < 0.01
        assert 0.9 < row["agreement"] <= 1
    assert [len(row["losses"]) for row in rows[-2:]] == [10, 10]
    losses = np.array([row["losses"] for row in rows[-2:]])
    assert 0 < np.abs(losses[0] - losses[1]).max() < 0.01


@pytest.mark.slow
def test_torch_bank_is_measured_beside_peft(tmp_path: Path) -> None:
    code, _, rows = run("bank --torch", tmp_path)
    assert code == 0
    assert [row["kind"] for row in rows] == 2 * ["base", "LoRA", "DoRA", "PEFT LoRA"]
    assert all(row["over_lora"] > 0 for row in rows if row["kind"] in ("DoRA", "PEFT LoRA"))


@pytest.mark.slow
def test_serve_measures_transformers_too(tmp_path: Path) -> None:
    code, _, rows = run("serve --torch", tmp_path)
    assert code == 0
    kinds = ["torch_dora DoRA", "PEFT LoRA", "PEFT DoRA"]
    found = [(row["kind"], row["adapters"]) for row in rows]
    assert found == [("transformers", 0), *((kind, n) for kind in kinds for n in (1, 3))]
    for row in rows:
        assert row["answers"] == torch_serve.TINY.rows
        assert row["tokens_per_s"] > 0
        assert 0 < row["first_token_ms"] <= row["first_token_p90_ms"]
        # PEFT's DoRA has one adapter at a time.
        many = row["kind"] == "PEFT DoRA" and row["adapters"] > 1
        assert (row["generates"] > 1) == many


@pytest.mark.slow
def test_tune_has_every_kernel_with_its_candidates() -> None:
    works = list(tune.works("cuda", Settings(tune.works)))
    assert len(works) == sum(len(kernel.shapes) for kernel in KERNELS.values())
    (first, *_) = tune.works("cpu", Settings(tune.works, quick=True))
    xla, own, candidate = first().variants
    assert (xla.name, own.name) == ("xla", "mosaic, chosen: no")
    assert candidate.name.startswith("mosaic ")
    assert measured(first(), own, "cpu", True).correct


def test_quick_runs_are_kept_out_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["ops", "--out", str(command.RESULTS / "new"), *QUICK])
    assert "nothing worth keeping" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["scale", "--rank", "7"],
        ["serve", "--torch", "--rank", "7"],
        ["step", "--layers", "2"],
        ["ops", "--axes", "auto"],
        ["quality", "--only", "encoder"],
    ],
    ids=" ".join,
)
def test_an_option_that_a_level_does_not_read_is_refused(words, capsys) -> None:
    with pytest.raises(SystemExit):
        command.main([*words, *QUICK])
    [option] = [word for word in words if word.startswith("--") and word not in GIVEN]
    assert f"has no {option.removeprefix('--')}" in capsys.readouterr().err


def test_a_missing_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["ops", "--device", "cuda"])
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_two_checkouts_are_measured_in_turns() -> None:
    assert "holds no jax_dora" in against.refuses(against.Settings(against.ROOT / "docs"))
    assert "this very checkout" in against.refuses(against.Settings(against.ROOT))
    settings = against.Settings(against.ROOT, True, ("layer*DoRA", "model step"))
    rows = list(against.measure(settings, "cpu"))
    assert not any(map(results.failed, rows))
    states = [(row["group"], row["state"], row["wall"]["samples"]) for row in rows]
    assert states == [
        (group, state, against.ROUNDS)
        for group in ("layer forward+backward", "model step")
        for state in ("here", "there")
    ]


def test_a_process_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (row,) = against.measure(against.Settings(tmp_path, True), "cpu")
    assert results.failed(row)


def test_kinds_are_named_once_and_chosen_by_label_and_task() -> None:
    assert len(BY_LABEL) == len(KINDS)
    assert set(model.EFFORT) == {task for kind in KINDS for task in kind.tasks}
    settings = Settings(model.works, quick=True)
    assert len(list(model.works("cpu", settings))) == sum(len(kind.tasks) for kind in KINDS)
    chosen = settings._replace(only=("model gradient*jax LoRA",))
    assert len(list(model.works("cpu", chosen))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("label", ["jax DoRA, norm kept (no Triton)", "torch torch_dora"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_model_s_gradient_is_measured(label: str) -> None:
    # JAX's own attention does not promote strictly.
    with jax.numpy_dtype_promotion("standard"):
        work = model.work(BY_LABEL[label], "gradient", QUICK_MODEL, "cpu")
        found = measured(work, work.variants[0], "cpu", True)
    assert found.correct, found
    assert found.label == label


@pytest.mark.slow
def test_step_table_changes_one_part_at_a_time(tmp_path: Path) -> None:
    only = ("as it is", "cross-entropy", "silu", "dropout", "LoRA, products")
    code, _, (first, *others) = run("step --table", tmp_path, *only)
    assert code == 0
    assert [row["kind"].startswith(name) for row, name in zip(others, only[1:], strict=True)]
    assert (first["over_first"], first["moved"]) == (1, 0)
    losses = {row["kind"].split()[0]: row["loss"] for row in others}
    # The loss and SwiGLU are the same function, however computed, up to bf16's roundings.
    assert losses["cross-entropy"] == pytest.approx(first["loss"], abs=2e-3)
    assert losses["silu(gate)"] == pytest.approx(first["loss"], abs=2e-3)


def test_kernels_are_counted_by_operator() -> None:
    names = ["gemm_fusion_dot_12", "gemm_fusion_dot_3", "dora_norm", "loop_add_fusion.4", "nvjet_a"]
    names += ["memcpy_7"]
    found = step_table.by_name([(name, 2.0) for name in names])
    assert found["gemm_fusion_dot"] == [2, 4.0]
    by_operator = step_table.by_operator(found)
    assert by_operator["other products"] == [3, 6.0]
    assert by_operator["kernels of jax_dora"] == [1, 2.0]
    assert sum(count for count, _ in by_operator.values()) == 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("level", ["step", "scale"])
def test_torch_steps_beside_peft(level: str, tmp_path: Path) -> None:
    code, _, rows = run(f"{level} --torch", tmp_path)
    assert code == 0
    assert {"PEFT", "torch_dora"} == {row["kind"].split()[0] for row in rows}
    # A fresh adapter is the base model, whoever's.
    assert [row["losses"][0] for row in rows] == pytest.approx(
        [rows[0]["losses"][0]] * len(rows), rel=1e-3
    )
    assert all(row["losses"][-1] < row["losses"][0] for row in rows)


def test_a_side_that_fails_is_no_other_s_base() -> None:
    def taken(side: torch_step.Side, *_: object) -> results.Row:
        if side is torch_step.SIDES[0]:
            raise RuntimeError("out of memory")
        return {"ms": 1.0}

    sides = torch_step.SIDES[:3]
    rows = list(torch_step.measure_sides(sides, taken, torch_step.TINY, "cpu", {}))
    assert "failed" in rows[0]
    assert not any("over_lora" in row for row in rows)
