"""`tools/sanitize.py` reads compute-sanitizer's output correctly, and runs every kernel."""

import importlib
import pkgutil
import re
import sys
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


# The planted faults that each tool finds.
SEEN = {("memcheck", "torch/planted overrun"), ("racecheck", "jax/planted race")}


@pytest.fixture
def run(monkeypatch):
    """Returns a function that runs the command with fake tools, and returns the exit status.

    The tools report `errors` for a kernel, and `planted` for the planted faults that they find.
    """

    def call(errors, planted, *arguments):
        def sanitized(tool, name):
            found = errors if "planted" not in name else planted if (tool, name) in SEEN else 0
            return {"errors": found, "seconds": 1.0, "last": ""}

        monkeypatch.setattr(sanitize, "sanitize", sanitized)
        monkeypatch.setattr(sys, "argv", ["sanitize.py", *map(str, arguments)])
        return sanitize.main()

    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    for framework, names in {"jax": ["planted race"], "torch": ["norm", "planted overrun"]}.items():
        monkeypatch.setitem(sanitize.KERNELS, framework, lambda names=names: names)
    return call


@pytest.mark.parametrize(
    ("errors", "planted", "status"),
    [(0, 72, 0), (72, 72, 1), (None, 72, 1), (0, 0, 1), (0, None, 1)],
)
def test_only_a_run_that_finds_the_planted_faults_alone_ends_with_0(
    run, errors, planted, status, tmp_path
):
    out = tmp_path / "sanitize.jsonl"
    assert run(errors, planted, "--commit", "abc", "--out", out) == status
    header, rows = results.read(out)
    assert header["environment"]["commit"] == "abc"
    found = {(row["tool"], row["kernel"]): row["errors"] for row in rows}
    kernel = {(tool, "torch/norm"): errors for tool in ("memcheck", "racecheck")}
    assert found == kernel | dict.fromkeys(SEEN, planted)


def test_a_kernel_or_a_tool_that_is_not_there_is_no_success(run, monkeypatch):
    with pytest.raises(SystemExit, match=r"'nrom' chooses none of: .*torch/norm"):
        run(0, 72, "--kernel", "nrom")
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="compute-sanitizer is not on PATH"):
        run(0, 72)


@pytest.mark.slow
def test_every_mosaic_kernel_is_run():
    """Each kernel module has a case, which lowers for CUDA to its own kernels alone."""
    (folder,) = map(Path, jax_dora.ops.mosaic.__path__)
    modules = {path.stem for path in folder.rglob("*.py") if "\ndef wins(" in path.read_text()}
    modules |= {path.stem for path in folder.rglob("*.py") if "import wins" in path.read_text()}
    assert modules - {"matmul_tiling"} == set(KERNELS)
    for name in KERNELS:
        case = sanitize.jax_kernels()[name]
        text = jax.jit(case).trace().lower(lowering_platforms=("cuda",)).as_text()
        # sanitize() finds our kernels by "dora" in their names.
        found = set(re.findall(r"dora_\w+(?=_mosaic_gpu\\)", text))
        of_bank = dict.fromkeys(("bank_rows", "bank_decode"), ("_shrink", "_expand"))
        wanted = {f"dora_{name}{part}" for part in of_bank.get(name, ("",))}
        assert found == wanted | ({"dora_decode_finish"} if name == "decode_project" else set())


@pytest.mark.slow
def test_every_triton_kernel_is_run(monkeypatch):
    """Each case runs in the interpreter, and together they launch every kernel."""
    monkeypatch.setattr(sanitize, "DEVICE", "cpu")
    launched: set[KernelInterface] = set()
    launch = KernelInterface.__getitem__

    def record(kernel, grid):
        launched.add(kernel)
        return launch(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", record)
    for name, kernel in sanitize.torch_kernels().items():
        if "planted" not in name:  # A planted fault would crash this process.
            kernel()
    package = torch_dora.ops.triton
    kernels = {
        value
        for module in pkgutil.iter_modules(package.__path__)
        for value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values()
        # sanitize() finds our kernels by "kernel" in their names; others are parts of kernels.
        if isinstance(value, KernelInterface) and "kernel" in value.__name__
    }
    assert kernels
    assert launched == kernels
