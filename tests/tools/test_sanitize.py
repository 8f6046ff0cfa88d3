"""`tools/sanitize.py`: what it makes of compute-sanitizer's words; it leaves no kernel out."""

import importlib
import pkgutil
import re
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

CLEAN = "========= ERROR SUMMARY: 0 errors"
FOUND = "========= Invalid __global__ write\n========= ERROR SUMMARY: 72 errors"
# Past 100 errors, memcheck adds a second summary.
UNPRINTED = f"{FOUND}\n========= ERROR SUMMARY: 4 errors were not printed"
HAZARD = "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"
# The errors that a sound run finds, which others are changes of.
SOUND = {
    "memcheck jax/planted overrun": 72,
    "memcheck torch/planted overrun": 72,
    "memcheck torch/norm": 0,
    "racecheck jax/planted race": 1,
    "racecheck torch/norm": 0,
}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`python tools/sanitize.py …` of a few kernels, of which compute-sanitizer finds so much."""

    def run(errors: dict[str, int | None], *arguments: object) -> int:
        def sanitized(tool: str, name: str) -> dict[str, object]:
            return {"errors": errors[f"{tool} {name}"], "seconds": 1.0, "last": ""}

        monkeypatch.setattr(sanitize, "sanitize", sanitized)
        monkeypatch.setattr(sys, "argv", ["sanitize.py", *map(str, arguments)])
        return sanitize.main()

    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    of_both = {"jax": ("planted race", "planted overrun"), "torch": ("planted overrun", "norm")}
    for framework, names in of_both.items():
        monkeypatch.setitem(sanitize.KERNELS, framework, lambda names=names: names)
    return run


@pytest.mark.parametrize(
    ("output", "code", "errors"),
    [
        (CLEAN, 0, 0),
        (FOUND, 9, 72),
        (UNPRINTED, 9, 72),
        (HAZARD, 0, 1),
        (f"RuntimeError: no such kernel\n{CLEAN}", 1, None),
        ("no driver", 0, None),
    ],
)
def test_errors_are_read(output, code, errors):
    assert sanitize.errors_of(output, code) == errors


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"racecheck jax/planted race": 0}, 1),
        ({"memcheck torch/norm": 72}, 1),
        ({"memcheck torch/norm": None}, 1),
    ],
)
def test_ends_with_0_only_if_the_planted_faults_are_all_that_is_found(call, tmp_path, change, code):
    out = tmp_path / "sanitize.jsonl"
    assert call(SOUND | change, "--commit", "abc", "--out", out) == code
    header, rows = results.read(out)
    assert header["environment"]["commit"] == "abc"
    found = {f"{row['tool']} {row['kernel']}": row["errors"] for row in rows}
    assert found == SOUND | change


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
        of_bank = dict.fromkeys(("bank_rows", "bank_few_rows"), ("_shrink", "_expand"))
        parts = (of_bank | {"few_rows": ("", "_finish")}).get(name, ("",))
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
