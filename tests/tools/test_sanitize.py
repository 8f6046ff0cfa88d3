"""`tools/sanitize.py`: what it makes of compute-sanitizer's words; it leaves no kernel out."""

import ast
import importlib
import pkgutil
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
import torch
from triton.runtime.jit import KernelInterface

import jax_dora.ops.mosaic
import torch_dora.ops.triton
from benchmarks import results
from benchmarks.kernels import KERNELS
from tools import sanitize

HEAD = "========= COMPUTE-SANITIZER"
CLEAN = f"{HEAD}\n========= ERROR SUMMARY: 0 errors"
INVALID = f"{HEAD}\n========= Invalid __global__ write of size 4 bytes\n"
FOUND = f"{INVALID}========= ERROR SUMMARY: 72 errors"
UNPRINTED = (
    f"{INVALID}========= ERROR SUMMARY: 104 errors\n========= ERROR SUMMARY: 4 errors were not "
    "printed. Use --print-limit option to adjust the number of printed errors"
)
NO_HAZARD = f"{HEAD}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
HAZARD = f"{HEAD}\n========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"
CRASH = f"""{HEAD}
Traceback (most recent call last):
RuntimeError: no such kernel
========= Target application returned an error
========= ERROR SUMMARY: 0 errors"""

Say = Callable[[dict[str, tuple[str, int]]], None]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What compute-sanitizer was called with, and the allocators that it saw."""
    return tmp_path / "log"


@pytest.fixture
def say(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Puts alone on PATH a compute-sanitizer with these words and exit codes, by tool and kernel.

    Any other kernel is clean.
    """

    def write(words: dict[str, tuple[str, int]]) -> None:
        path = tmp_path / "bin/compute-sanitizer"
        path.parent.mkdir(exist_ok=True)
        cases = [
            f"{shlex.quote(case)}) printf '%s\\n' {shlex.quote(text)}; exit {code} ;;"
            for case, (text, code) in words.items()
        ]
        allocators = "$XLA_PYTHON_CLIENT_ALLOCATOR $PYTORCH_NO_CUDA_MEMORY_CACHING"
        lines = [
            "#!/bin/sh",
            f'echo "$* {allocators}" >>{shlex.quote(str(log))}',
            "while [ $# -gt 0 ]; do",
            '  case "$1" in --tool) tool="$2" ;; --one) name="$2" ;; esac; shift',
            "done",
            'case "$tool $name" in',
            *cases,
            f"*) printf '%s\\n' {shlex.quote(CLEAN)} ;;",
            "esac",
        ]
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(path.parent))

    return write


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`python tools/sanitize.py …`, with these kernels for the packages'."""
    kernels = {
        "jax": ("planted race", "planted overrun", "sound"),
        "torch": ("planted overrun", "norm"),
    }

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["sanitize.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        return sanitize.main()

    for framework, names in kernels.items():
        by_name = dict.fromkeys(names, lambda: None)
        monkeypatch.setitem(sanitize.KERNELS, framework, lambda by_name=by_name: by_name)
    return run


@pytest.mark.parametrize(
    ("text", "code", "errors", "shown"),
    [
        (CLEAN, 0, 0, "========= ERROR SUMMARY: 0 errors"),
        (NO_HAZARD, 0, 0, NO_HAZARD.splitlines()[-1]),
        (FOUND, 9, 72, FOUND),
        (HAZARD, 0, 1, HAZARD),
        (UNPRINTED, 9, 104, UNPRINTED),
        # The fault took the process down with it.
        (FOUND, 1, 72, FOUND),
        (CRASH, 1, None, CRASH),
        (CLEAN, 139, None, CLEAN),
        ("no driver", 0, None, "no driver"),
        ("", 127, None, ""),
    ],
)
def test_reads_the_number_of_errors(say, text, code, errors, shown):
    say({"memcheck jax/norm": (text, code)})
    found = sanitize.sanitize("memcheck", "jax/norm")
    assert (found["errors"], found["last"]) == (errors, shown)
    assert found["seconds"] >= 0


@pytest.mark.parametrize(("framework", "ours"), [("jax", "dora"), ("torch", "kernel")])
def test_runs_itself_under_the_tool_on_our_kernels_only(say, log, framework, ours):
    say({})
    sanitize.sanitize("racecheck", f"{framework}/norm fp32")
    assert log.read_text() == (
        f"--tool racecheck --error-exitcode 9 --kernel-name kernel_substring={ours} "
        f"{sys.executable} {sanitize.__file__} --one {framework}/norm fp32 platform 1\n"
    )


def test_one_runs_that_kernel(call, monkeypatch):
    ran: list[str] = []
    kernels = {name: lambda name=name: ran.append(name) for name in ("norm", "norm fp32")}
    monkeypatch.setitem(sanitize.KERNELS, "jax", lambda: kernels)
    assert call("--one", "jax/norm fp32") == 0
    assert ran == ["norm fp32"]
    with pytest.raises(KeyError, match="absent"):
        call("--one", "jax/absent")


PLANTED_FOUND = {
    "memcheck jax/planted overrun": (FOUND, 9),
    "memcheck torch/planted overrun": (FOUND, 9),
    "racecheck jax/planted race": (HAZARD, 9),
}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ({}, 0),
        ({"racecheck jax/planted race": (NO_HAZARD, 0)}, 1),
        ({"memcheck torch/planted overrun": (CRASH, 1)}, 1),
        ({"memcheck torch/norm": (FOUND, 9)}, 1),
        ({"racecheck jax/sound": (HAZARD, 0)}, 1),
        ({"memcheck jax/sound": (CRASH, 1)}, 1),
    ],
)
def test_ends_with_0_only_if_the_planted_faults_are_all_that_is_found(
    say, call, capsys, words, code
):
    say(PLANTED_FOUND | words)
    assert call("--commit", "abc") == code
    printed = capsys.readouterr().out
    # The last lines of what is not as it should be, and of nothing else.
    shown = [line for line in printed.splitlines() if line.startswith("=========")]
    assert bool(shown) == bool(words)
    assert all(text.splitlines()[-1] in shown for text, _ in words.values())


def test_writes_what_each_tool_found(say, call, tmp_path):
    say(PLANTED_FOUND | {"racecheck torch/norm": (CRASH, 1)})
    out = tmp_path / "results/sanitize.jsonl"
    assert call("--out", out, "--commit", "abc") == 1
    header, rows = results.read(out)
    assert header["environment"]["commit"] == "abc"
    errors: dict[str, dict[str, int | None]] = {}
    for row in rows:
        errors.setdefault(row["tool"], {})[row["kernel"]] = row["errors"]
    assert errors == {
        "memcheck": {
            "jax/planted overrun": 72,
            "jax/sound": 0,
            "torch/planted overrun": 72,
            "torch/norm": 0,
        },
        "racecheck": {"jax/planted race": 1, "jax/sound": 0, "torch/norm": None},
    }


def test_a_kernel_that_is_not_there_is_no_success(say, call, log, tmp_path):
    say({})
    with pytest.raises(SystemExit, match=r"'nrom' chooses none of: .*torch/norm"):
        call("--kernel", "nrom", "--out", tmp_path / "out.json")
    assert not log.exists()
    assert not (tmp_path / "out.json").exists()


def test_says_that_the_tool_is_missing(call, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="compute-sanitizer is not on PATH"):
        call("--out", tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def names_given(source: Path) -> Iterator[str]:
    """The names of the Mosaic kernels in `source`."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "plgpu.kernel":
            assert "kernel_name" in {keyword.arg for keyword in node.keywords}, source
        if isinstance(node, ast.keyword) and node.arg == "kernel_name":
            parts = (part for part in ast.walk(node.value) if isinstance(part, ast.Constant))
            yield from (str(part.value) for part in parts)


def test_every_mosaic_kernel_is_run():
    """Each case lowers for CUDA, and one has each kernel."""
    (folder,) = map(Path, jax_dora.ops.mosaic.__path__)
    given = {name for source in folder.glob("*.py") for name in names_given(source)}
    # What sanitize() tells our kernels by.
    assert all("dora" in name for name in given)
    assert given == {f"dora_{name}" for name in KERNELS}
    for name in KERNELS:
        case = sanitize.jax_kernels()[name]
        text = jax.jit(case).trace().lower(lowering_platforms=("cuda",)).as_text()
        assert set(re.findall(r"dora_\w+(?=_mosaic_gpu\\)", text)) == {f"dora_{name}"}


@pytest.fixture
def torch_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the torch cases' operands drawn on the CPU."""
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device: randn(*shape))


@pytest.mark.usefixtures("torch_on_cpu")
def test_every_triton_kernel_is_run(monkeypatch):
    """Each case runs, interpreted, and one launches each kernel."""
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
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    kernels = {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, KernelInterface)
    }
    assert len(kernels) >= len(modules) - 1
    assert [name for name, kernel in kernels.items() if kernel not in launched] == []
    # What sanitize() tells our kernels by.
    assert all("kernel" in kernel.__name__ for kernel in kernels.values())


@pytest.mark.usefixtures("torch_on_cpu")
def test_every_planted_fault_is_there():
    names = {f"{framework}/{name}" for framework, of in sanitize.KERNELS.items() for name in of()}
    planted = {name for faults in sanitize.PLANTED.values() for name in faults}
    assert planted == {name for name in names if "planted" in name}
