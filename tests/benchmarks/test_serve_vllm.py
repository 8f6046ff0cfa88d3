"""What level `serve --vllm` starts and measures on one GPU and on two, without vLLM."""

import io
import json

import pytest
import torch

from benchmarks import serve_vllm
from benchmarks.serve_vllm import ONE_GPU, OWN, PUNICA, QUANTISED, WITHOUT, Settings


class Process:
    """In place of an engine's process: answers each line that it is told."""

    def __init__(self, kind):
        self.kind, self.stdin, self.works = kind, io.StringIO(), []
        self.stdin.write = self.tell
        numbers = [0.5, 0.25] if kind == WITHOUT else [0.5, 0.25 + (kind == "check") / 8]
        answers = {"all": [[1, 2]], "base": [[[1, 2], [0.5]]], "LoRA": [[[1, 2], numbers]]}
        checked = {"check": {"passed": True}, "answers": answers}
        self.stdout = iter(self.lines(checked))

    def lines(self, checked):
        if self.kind.startswith("check") or self.kind == OWN:
            yield f"ROW {json.dumps({'kind': self.kind} | checked)}\n"
        yield "READY\n"
        while self.works:
            speed = 4.0 - len(self.works) / 16 if self.kind == "base" else 2.0
            found = {"load_ms": 1.0} if self.works[-1][1] is None else {"tokens_per_s": speed}
            yield f"ROW {json.dumps({'kind': self.kind} | found)}\n"

    def tell(self, line):
        if line.strip():
            self.works.append(json.loads(line))

    def kill(self):
        pass


def run(monkeypatch, gpus, **settings):
    """Returns the rows, and the engines with their settings."""
    started = {}

    def start(settings, kind, folder):
        started[kind] = Process(kind), settings
        return started[kind][0]

    monkeypatch.setattr(serve_vllm, "_start", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    return list(serve_vllm.measure(Settings(**settings), "cuda")), started


def test_one_gpu_has_every_cell_and_its_checks(monkeypatch):
    rows, started = run(monkeypatch, 1)
    assert list(started) == [WITHOUT, "check", PUNICA, QUANTISED, "base", "DoRA", "LoRA", OWN]
    assert not any(row.get("failed") for row in rows)
    usual = [64, 128]
    for kind in ("DoRA", "LoRA"):
        works = started[kind][0].works
        assert {work[1] for work in works if work[2:4] == usual} >= {0, 1, 4, 8, 64, None}
        loads = [work[1] for work in works].index(None)
        assert not any(work[1] for work in works[:loads])  # Nothing has been loaded before.
    wide = [work[1] for work in started["DoRA"][0].works if work[2] == 256]
    assert set(wide) == {1, 8, 64}
    assert {work[1] for work in started["DoRA"][0].works if work[3] == 1024} == {1, 8, 64}
    assert {tuple(work[2:4]) for work in started["base"][0].works} == {
        (64, 128),
        (256, 128),
        (64, 1024),
    }
    bits = {row["kind"]: row["same_bits"] for row in rows if "same_bits" in row}
    assert bits == {"check": {"base": 1, "LoRA": 0}, PUNICA: {"base": 1, "LoRA": 1}}
    assert all(row["check"]["passed"] for row in rows if "check" in row)


def test_the_base_takes_turns_with_each_line(monkeypatch):
    rows, started = run(monkeypatch, 1, only=("base", "DoRA"), rounds=3)
    works = [serve_vllm.Work(*work) for work in started["DoRA"][0].works]
    assert [one.is_first for one in works[1:4]] == [True, False, False]
    bases = [serve_vllm.Work(*work) for work in started["base"][0].works]
    first = {(one.rows, one.prompt): one for one in reversed(bases)}
    assert all(one.is_first for one in first.values())  # Each size has been warmed.
    assert sum(one.is_first for one in bases) == len(first)
    lines = [row for row in rows if row["kind"] == "DoRA"][1:]
    assert all(len(row["rates"]) == len(row["base_rates"]) for row in lines)
    assert [row["of_base"] for row in lines] == [2 / max(row["base_rates"]) for row in lines]
    slower = [max(row["base_rates"]) for row in lines]
    assert slower == sorted(slower, reverse=True)
    assert slower[0] > slower[-1]


def test_lines_are_measured_by_name_with_the_base_of_their_sizes(monkeypatch):
    only = ("base", "DoRA 64", "DoRA load")
    _, started = run(monkeypatch, 1, only=only)
    assert [work[1:4] for work in started["DoRA"][0].works if work[-1]] == [
        [None, 64, 128],
        [64, 64, 128],
        [64, 256, 128],
        [64, 64, 1024],
    ]
    assert not started["DoRA"][1].eager
    _, started = run(monkeypatch, 1, only=("DoRA load", "LoRA load"))
    assert list(started) == ["DoRA", "LoRA"]
    assert all(settings.eager for _, settings in started.values())


@pytest.mark.parametrize("gpus", [2, 8])
def test_two_gpus_have_tensor_parallel_engines_and_checks(monkeypatch, gpus):
    rows, started = run(monkeypatch, gpus)
    checks = ["check, two GPUs", "check, two GPUs, fully sharded"]
    assert list(started) == [ONE_GPU, *checks, "base", "DoRA", "LoRA"]
    assert {settings.gpus for _, settings in started.values()} == {2}
    options = serve_vllm.checks_of(started[ONE_GPU][1])
    assert [one.get("tensor_parallel_size") for one in options.values()] == [None, 2, 2]
    assert [row["same_on_one"] for row in rows if "same_on_one" in row] == [1, 1]
    for kind, rounds in (("DoRA", 3), ("LoRA", 1)):
        assert [work[1] for work in started[kind][0].works] == [None] + [8] * rounds
    rows, started = run(monkeypatch, gpus, only=checks[1:])
    assert list(started) == checks[1:]
    assert "same_on_one" not in rows[0]


def test_other_bits_of_the_base_fail_the_check(monkeypatch):
    row = {"kind": "check", "check": {"passed": True}}
    serve_vllm._compare_bits(row, {"base": [[1, 0.5]]}, {"base": [[1, 0.25]]}, {})
    assert row["same_bits"] == {"base": 0}
    assert not row["check"]["passed"]


@pytest.mark.parametrize(("here", "without", "passes"), [(1, 2, True), (2, 1, True), (2, 2, False)])
def test_other_bits_of_a_lora_adapter_fail_if_vllm_repeats_its_own(here, without, passes):
    """On a GPU, vLLM's kernels themselves may have others from run to run."""
    row = {"kind": PUNICA, "check": {"passed": True}, "bits_again": {"base": 1, "LoRA": here}}
    found = {"base": [[1, 0.5]], "LoRA": [[1, 0.5], [2, 0.5]], "all": [[1], [2]]}
    expected = found | {"LoRA": [[1, 0.5], [2, 0.25]]}
    serve_vllm._compare_bits(row, found, expected, {"base": 1, "LoRA": without})
    assert row["same_bits"] == {"base": 1, "LoRA": 1}
    assert row["check"]["passed"] == passes
