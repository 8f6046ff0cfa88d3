"""`tools/sanitize.py`: what it makes of compute-sanitizer's words; it leaves no kernel out."""

import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from triton.runtime.jit import KernelInterface

import jax_dora.ops.mosaic
import torch_dora.ops.triton
from benchmarks import results
from benchmarks.kernels import KERNELS
from tools import sanitize

HEAD = "========= COMPUTE-SANITIZER"
CLEAN = f"{HEAD}\n========= ERROR SUMMARY: 0 errors"
FOUND = f"{HEAD}\n========= Invalid __global__ write\n========= ERROR SUMMARY: 72 errors"
# Past 100 errors, memcheck adds a second summary.
UNPRINTED = f"{FOUND}\n========= ERROR SUMMARY: 4 errors were not printed"
HAZARD = f"{HEAD}\n========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"
CRASH = f"{HEAD}\nRuntimeError: no such kernel\n========= ERROR SUMMARY: 0 errors"
PLANTED_FOUND = {
    "memcheck jax/planted overrun": (FOUND, 9),
    "memcheck torch/planted overrun": (FOUND, 9),
    "racecheck jax/planted race": (HAZARD, 9),
}
KERNELS_OF_BOTH = {
    "jax": ("planted race", "planted overrun", "sound"),
    "torch": ("planted overrun", "norm"),
}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`python tools/sanitize.py …` of a few kernels, of which compute-sanitizer says these words,
    with these exit codes, by tool and kernel; any other is clean."""

    def run(words: dict[str, tuple[str, int]], *arguments: object) -> int:
        def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            if command[0] != "compute-sanitizer":
                raise FileNotFoundError(command[0])
            tool, name = (command[command.index(flag) + 1] for flag in ("--tool", "--one"))
            text, code = words.get(f"{tool} {name}", (CLEAN, 0))
            return subprocess.CompletedProcess(command, code, text)

        monkeypatch.setattr(sanitize.subprocess, "run", answer)
        monkeypatch.setattr(sys, "argv", ["sanitize.py", *map(str, arguments)])
        return sanitize.main()

    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    for framework, names in KERNELS_OF_BOTH.items():
        by_name = dict.fromkeys(names, lambda: None)
        monkeypatch.setitem(sanitize.KERNELS, framework, lambda by_name=by_name: by_name)
    return run


@pytest.mark.parametrize(
    ("where", "words", "code", "errors"),
    [
        ("memcheck torch/norm", (CLEAN, 0), 0, 0),
        ("racecheck jax/planted race", (CLEAN, 0), 1, 0),
        ("memcheck torch/norm", (FOUND, 9), 1, 72),
        ("memcheck torch/norm", (UNPRINTED, 9), 1, 72),
        ("racecheck jax/sound", (HAZARD, 0), 1, 1),
        ("racecheck jax/sound", (CRASH, 1), 1, None),
        ("memcheck torch/norm", (CLEAN, 139), 1, None),
        ("memcheck torch/norm", ("no driver", 0), 1, None),
    ],
)
def test_ends_with_0_only_if_the_planted_faults_are_all_that_is_found(
    call, tmp_path, where, words, code, errors
):
    out = tmp_path / "sanitize.jsonl"
    assert call(PLANTED_FOUND | {where: words}, "--commit", "abc", "--out", out) == code
    header, rows = results.read(out)
    assert header["environment"]["commit"] == "abc"
    found = {f"{row['tool']} {row['kernel']}": row["errors"] for row in rows}
    assert len(found) == 7
    assert found[where] == errors


def test_a_kernel_or_a_tool_that_is_not_there_is_no_success(call, monkeypatch):
    with pytest.raises(SystemExit, match=r"'nrom' chooses none of: .*torch/norm"):
        call({}, "--kernel", "nrom")
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="compute-sanitizer is not on PATH"):
        call({})


@pytest.mark.slow
def test_every_mosaic_kernel_is_run():
    """Each kernel's module has a case, which lowers for CUDA to its kernels alone."""
    (folder,) = map(Path, jax_dora.ops.mosaic.__path__)
    modules = {path.stem for path in folder.glob("*.py") if "\ndef wins(" in path.read_text()}
    modules |= {path.stem for path in folder.glob("*.py") if "import wins" in path.read_text()}
    assert modules - {"product_tiling"} == set(KERNELS)
    for name in KERNELS:
        case = sanitize.jax_kernels()[name]
        text = jax.jit(case).trace().lower(lowering_platforms=("cuda",)).as_text()
        # "dora" is what sanitize() tells our kernels by.
        found = set(re.findall(r"dora_\w+(?=_mosaic_gpu\\)", text))
        parts = {"bank_rows": ("_shrink", "_expand"), "few_rows": ("", "_finish")}.get(name, ("",))
        assert found == {f"dora_{name}{part}" for part in parts}


@pytest.mark.slow
def test_every_triton_kernel_is_run(monkeypatch):
    """Each case runs, interpreted, and one launches each kernel."""
    monkeypatch.setattr(sanitize, "DEVICE", "cpu")
    launched: set[KernelInterface] = set()
    launch = KernelInterface.__getitem__

    def record(kernel, grid):
        launched.add(kernel)
        return launch(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", record)
    for name, kernel in sanitize.torch_kernels().items():
        if "planted" not in name:  # its fault would be one of this process
            kernel()
    package = torch_dora.ops.triton
    kernels = {
        value
        for module in pkgutil.iter_modules(package.__path__)
        for value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values()
        # What sanitize() tells our kernels by; others are parts of them.
        if isinstance(value, KernelInterface) and "kernel" in value.__name__
    }
    assert kernels
    assert launched == kernels
