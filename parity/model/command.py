"""The command line of `python -m parity model`."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

DTYPES = {"bf16": ("bfloat16",), "fp32": ("float32",), "both": ("bfloat16", "float32")}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parity model",
        description="Runs one decoder with one DoRA adapter through Flax and jax_dora, through "
        "transformers and torch_dora, through transformers and PEFT, and densely in fp64, and "
        "compares logits and the adapter's gradients. Run it from the repository's root: the Flax "
        "decoder is jax_dora.models.",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cpu runs a tiny model and interprets the kernels; cuda one of Qwen3-8B's size",
    )
    parser.add_argument("--out", type=Path, help="report folder; default parity/reports/<device>")
    parser.add_argument("--quick", action="store_true", help="few layers")
    parser.add_argument("--layers", type=_positive, help="of every run, in place of its own")
    parser.add_argument("--sequence", type=_positive, help="tokens of every run")
    parser.add_argument("--dtype", choices=DTYPES, default="both")
    parser.add_argument("--commit", help="to record in the report, where there is no git checkout")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def main(arguments: Sequence[str]) -> int:
    """0 if every check of every run passed, else 1."""
    from parity.__main__ import set_up

    options = parse(arguments)
    device = set_up(options.device)

    from rich.console import Console

    try:
        from parity.model.checks import judge
        from parity.model.execute import execute, free_memory, systems
        from parity.model.report import Entry, Report
    except ModuleNotFoundError as error:
        sys.exit(
            f"python -m parity model: {error}; it needs transformers and peft (pip install "
            "'jax-dora[dev]') and jax_dora.models, so run it from the repository's root"
        )
    from parity.model.sizes import runs
    from parity.model.weights import draw

    start = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {line}", file=sys.stderr, flush=True)

    folder = options.out or Path(__file__).parents[1] / "reports" / device
    report = Report(device, commit=options.commit)
    chosen = runs(
        device,
        DTYPES[options.dtype],
        quick=options.quick,
        layers=options.layers,
        tokens=options.sequence,
    )
    for run in chosen:
        say(run.name)
        weights = draw(run, device)
        free = free_memory(weights.tokens.device)
        say("  weights drawn" + ("" if free is None else f", {free:.1f} GiB free"))
        executed = execute(run, weights, systems(run), say)
        verdict = judge(run, executed.results, executed.errors)
        say("  compared")
        losses = {name: result.loss for name, result in executed.results.items()}
        executed.results.clear()
        report.entries.append(Entry(run, executed, losses, verdict))
        # What is finished is on the disk, whatever happens to the runs that follow.
        report.write(folder)
        del weights
        gc.collect()

    report.print(Console(width=None if sys.stdout.isatty() else 170))
    print(f"written: {folder / 'model.md'}, {folder / 'model.json'}")
    return 0 if report.passed else 1
