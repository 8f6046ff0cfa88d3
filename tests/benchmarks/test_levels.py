"""The levels run by the commands of docs/development.md, on tiny shapes and without a GPU."""

from pathlib import Path

import jax
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import baselines, encoder, fp8_training, ops, results, scale, step_torch
from benchmarks.model import placed
from benchmarks.model.protocol import QUICK as QUICK_SIZES
from benchmarks.work import Expectation, judge
from parity import oracle, tolerances
from parity.cases import Case, layer_inputs

QUICK = ("--quick", "--device", "cpu")
COMPILED = ("", ", compiled")
FROZEN = ", frozen", ", frozen, compiled"
# The arguments of a level, a field of its rows, and the expected values of that field.
LEVELS = {
    "ops": (
        ("--only", "norm 64×48*[adPf]*", "--only", "backward,*[xe]*"),
        "variant",
        {"factored", "dense", "the paper's", "PEFT", "xla", "mosaic", "eager", "triton"},
    ),
    "layer": (
        ("--only", "*jax LoRA (", "--only", "*jax DoRA, norm k*(", "--only", "*PEFT DoRA, def"),
        "variant",
        {"LoRA (no Triton)", "DoRA, norm kept (no Triton)", "PEFT DoRA, defaults"},
    ),
    "vlm": (
        ("--only", "Qwen3-VL-8B"),
        "kind",
        {
            *(f"PEFT {kind}, bf16 adapters{end}" for kind in ("LoRA", "DoRA") for end in COMPILED),
            *(f"torch_dora DoRA, bf16 adapters{end}" for end in (*COMPILED, *FROZEN)),
            *(f"{one} DoRA, fp32 adapters, autocast" for one in ("PEFT", "torch_dora")),
        },
    ),
    "tune": (
        ("--only", "one pass norm *"),
        "variant",
        {
            "xla",
            "mosaic, chosen: no",
            "mosaic by default",
            "triton, chosen: no",
            "triton features=64 width=64 depth=64 warps=4",
        },
    ),
    "triton": ((), "variant", {"mosaic", "triton"}),
    "bank": ((), "kind", {"base", "LoRA", "DoRA", "first", "again"}),
    "serve": ((), "kind", {"base", "LoRA", "DoRA"}),
    "scale": (("--layouts", "tp"), "kind", {"base", "LoRA", "DoRA"}),
    "compile": ((), "kind", {"LoRA", "DoRA"}),
    "sizes": ((), "task", {"decode", "gradient"}),
    "quantised": (
        (),
        "work",
        {"norm", "few rows", "product", "projection", "gradient", "decode", "step", "memory"},
    ),
    "quality": ((), "model", {"decoder"}),
    "fp8_training": ((), "format", {one.name for one in fp8_training.TINY.variants}),
    "encoder": (
        ("--only", "tiny transformers eager", "--only", "tiny jax_dora XLA"),
        "side",
        {"transformers eager", "jax_dora XLA"},
    ),
    "step": ((), "kind", {"LoRA", "DoRA"}),
}


def run(level: str, folder: Path, *options: str) -> tuple[int, dict, list[dict]]:
    arguments = [*level.split(), "--out", str(folder), *QUICK, "--commit", "abc", *options]
    code = command.main(arguments)
    return code, *results.read(folder / f"{level.replace(' --', '_')}.jsonl")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, of layers
@pytest.mark.parametrize("level", LEVELS)
def test_a_level_is_measured(level: str, tmp_path: Path) -> None:
    options, field, values = LEVELS[level]
    code, header, rows = run(level, tmp_path, *options)
    assert code == 0, rows
    assert (header["level"], header["quick"]) == (level.split()[0], True)
    assert header["environment"]["commit"] == "abc"
    assert {row[field] for row in rows} == values
    # On several devices there must be collectives.
    assert all(row.get("sent_bytes", 1) > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [True, False])
def test_wrong_results_and_errors_are_caught(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ops.torch_ops.compose

    def broken(*arguments, **options):
        if not wrong:
            raise RuntimeError("out of memory")
        return right(*arguments, **options) * 1.02

    monkeypatch.setattr(ops.torch_ops, "compose", broken)
    only = ("--only", "compose 3×64*eager", "--only", "compose 3×64 jax xla")
    code, _, (xla, eager) = run("ops", tmp_path, *only)
    assert code == 1
    assert xla["check"]["passed"]
    assert eager.get("failed") == (None if wrong else "RuntimeError: out of memory")
    assert wrong != ("check" not in eager)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scale", "--rank", "7", *QUICK], "has no rank"),
        (["scale", "--only", "lora", *QUICK], "--only is 'lora'; expected one of 'base', 'LoRA'"),
        (["bank", "--rank", "7", *QUICK], "has no rank"),
        (["serve", "--torch", *QUICK], "there is no level serve --torch"),
        (["quality", "--only", "encoder", *QUICK], "has no only"),
        (["ops", "--out", str(results.FOLDER / "new"), *QUICK], "nothing worth keeping"),
        (["ops", "--device", "cuda"], "no GPU"),
    ],
)
def test_wrong_arguments_are_rejected(words, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(words)
    assert message in capsys.readouterr().err


def test_encoders_take_turns_but_for_large_ones() -> None:
    """Sides of one encoder share a group, so that they are compared in the same rounds."""
    settings = encoder.Settings()
    works = [
        encoder.Work(one, side, settings, "cpu")
        for one in settings.encoders
        for side in encoder.SIDES[:5]
    ]
    groups = list(encoder._groups(works, 3))
    assert [len(group) for group in groups] == [3, 1, 1, 3, 2]
    assert [work for group in groups for work in group] == works


def test_a_step_on_explicit_axes_keeps_shardings() -> None:
    """The adapters and the optimizer state keep theirs, by the types of the step's results."""
    mesh = placed.LAYOUTS["tp"].mesh("explicit", 2)
    model = placed.placed("DoRA", placed.LAYOUTS["tp"], mesh, QUICK_SIZES, "cpu")
    with jax.set_mesh(mesh):
        traced = scale.program("step", model, QUICK_SIZES.last).trace(*model[1:])
    _, *found = traced.out_info
    places = zip(*map(jax.tree.leaves, (found, [model.trained, model.state])), strict=True)
    assert all(one.sharding == other.sharding for one, other in places)


def test_the_paper_s_norm_adds_up_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks, the last one narrower than the others."""
    case = Case("operator", "float32", n_in=200, n_out=56, rank=12, bias=False)
    drawn = layer_inputs(case, "cpu")
    operands = drawn.weight, drawn.lora_a, drawn.lora_b, case.scale
    monkeypatch.setattr(baselines, "PAPER_CHUNK_BYTES", 64 * 4 * 56)
    expected = Expectation(oracle.norm(*operands), tolerances.norm(*operands))
    found = {"norm": baselines.paper_norm(*operands)}
    assert judge(found, {"norm": expected}, exact=True)["passed"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("level", ["step", "scale", "quantised"])
def test_torch_steps_beside_peft(level: str, tmp_path: Path) -> None:
    code, _, rows = run(f"{level} --torch", tmp_path)
    assert code == 0
    assert {"PEFT", "torch_dora"} == {row["kind"].split()[0] for row in rows}
    # Before the first step, every adapter computes the same as the base.
    assert [row["losses"][0] for row in rows] == pytest.approx(
        [rows[0]["losses"][0]] * len(rows), rel=1e-3
    )
    assert all(row["losses"][-1] < row["losses"][0] for row in rows)


def test_ratios_need_a_first_side_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(side: step_torch.Side, *_: object) -> results.Row:
        if side is step_torch.SIDES[0]:
            raise RuntimeError("out of memory")
        return {"ms": 1.0}

    monkeypatch.setattr(step_torch, "steps", steps)
    rows = list(step_torch.measure(step_torch.TINY._replace(sides=step_torch.SIDES[:3]), "cpu"))
    assert "failed" in rows[0]
    assert not any("over_lora" in row for row in rows)
