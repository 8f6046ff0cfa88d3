"""`python -m parity`: exit codes, reports, filters."""

import pytest

from parity import cases, command
from parity.__main__ import main
from parity.report import passed, read
from tests.tables import thinned


@pytest.mark.parametrize(
    "case",
    thinned(
        ["compose 5x43 bfloat16", "compose 7x72 float16 near unity", "5x27x43 r3 float32"],
        ["5x27x43 r3 float32"],
    ),
)
def test_cases_pass(case, tmp_path):
    given = ["--device", "cpu", "--case", f"{case}$", "--commit", "abc", "--out", str(tmp_path)]
    assert main(given) == 0
    (file,) = tmp_path.iterdir()
    header, rows = read(file)
    assert passed(rows)
    assert header["environment"]["commit"] == "abc"
    sides = {row["side"] for row in rows if row["quantity"] != "seconds"}
    # Mosaic takes no width that is not a multiple of 8.
    kernels = ["torch triton"] if "43" in case else ["jax mosaic", "torch triton"]
    assert {side for side in sides if "," not in side} == {"jax xla", "torch eager", *kernels}


def test_reports_that_are_committed_stay_as_they_are(tmp_path, monkeypatch):
    """Pages show their numbers, which the next `make test` compares."""
    monkeypatch.chdir(tmp_path)
    command.report(command.parse("", ["--device", "cpu", "--commit", "abc"]), "operator")
    assert (tmp_path / "parity-reports" / "cpu" / "operator.jsonl").exists()


def test_list_names_every_case(capsys):
    assert main(["--device", "cpu", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == len(set(names))
    for word in ("cancellation", "zero rows", "near unity", "rslora", "frozen magnitude", "r768"):
        assert any(word in name for name in names), word


def test_a_filter_that_matches_nothing_is_an_error():
    with pytest.raises(SystemExit, match="no case matches --case 'unheard of'"):
        main(["--device", "cpu", "--case", "unheard of"])


def test_a_broken_expression_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--case", "("])
    assert "'(' is not a regular expression" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cuda"], "--device: invalid choice: 'cuda'"),
        (["--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_controls_reject_the_flags_that_they_cannot_follow(flags, message, capsys):
    # The unknown fault ends the command if the flags are accepted.
    with pytest.raises(SystemExit, match="2"):
        main(["controls", *flags, "--fault", "unheard of"])
    assert message in capsys.readouterr().err


def test_a_gpu_runs_every_paper_shape():
    names = [case.name for case in cases.gpu_cases()]
    assert len(names) == len(set(names))
    for rows, out in cases.PAPER_ACTIVATIONS:
        assert f"compose {rows}x{out} bfloat16" in names


@pytest.mark.parametrize(
    ("level", "case"), [("quantised", "nf4.* r7 float32"), ("bank", "bank float32 40→24, 9 rows")]
)
def test_a_level_is_a_command_too(level, case, tmp_path):
    for number, start in enumerate([[level], ["--level", level]]):
        out = tmp_path / str(number)
        given = [*start, "--device", "cpu", "--quick", "--case", case, "--out", str(out)]
        assert main(given) == 0
        header, rows = read(out / f"{level}.jsonl")
        assert header["level"] == level
        assert "peft" in header["environment"]
        assert {row["side"] for row in rows if row["ok"] is not None} == {"jax", "torch", "peft"}


def test_the_level_of_vllm_says_what_is_missing():
    # Where there is vLLM, tests/torch_dora/vllm runs the level.
    with pytest.raises(SystemExit, match=r"no vLLM in this environment: `make setup-vllm`"):
        main(["vllm", "--device", "cpu"])


def test_every_level_runs_without_a_command(capsys):
    main(["--device", "cpu", "--quick", "--list"])
    names = capsys.readouterr().out
    for word in ("compose", "layer", "nf4", "int4", "int8", "float8_e4m3fn", "bank"):
        assert word in names


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["operator", "layer", "quantised", "bank"])
def test_kernels_pass_natively(level, tmp_path):
    assert main(["--device", "cuda", "--quick", "--level", level, "--out", str(tmp_path)]) == 0
    assert read(tmp_path / f"{level}.jsonl")[0]["environment"]["kernels"] == "native"
