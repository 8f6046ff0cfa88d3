"""`python -m parity`: both packages against each other and against fp64; exit code 1 on failure."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

LEVELS = ("operator", "layer", "encoder")
# What the first word may ask for instead: a module whose `main(arguments)` returns the exit code.
COMMANDS = {
    "model": "parity.model",
    "training": "parity.training",
    "controls": "parity.controls",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parity",
        description="Runs the same weights, inputs and cotangents through jax_dora and torch_dora, "
        "and compares both with a materialised fp64 computation.",
        epilog="`python -m parity {model,training,controls} --help`: whole models, training runs, "
        "and the proof that each level catches planted faults.",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cpu interprets the kernels at small shapes; cuda runs them at the paper's",
    )
    parser.add_argument("--out", type=Path, help="report folder; default parity/reports/<device>")
    parser.add_argument("--level", action="append", choices=LEVELS, help="only this; repeatable")
    parser.add_argument(
        "--case", default="", help="only cases whose name has this regular expression"
    )
    parser.add_argument("--quick", action="store_true", help="one small case of every kind")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--commit", help="to record in the report, where there is no git checkout")
    options = parser.parse_args(arguments)
    try:
        re.compile(options.case)
    except re.error as error:
        parser.error(f"--case is {options.case!r}, no regular expression: {error}")
    options.level = options.level or list(LEVELS)
    return options


def set_up(device: str) -> str:
    """Chooses the device for both frameworks, before either kernel package is imported.

    Raises:
      SystemExit: "cuda" was asked for and one of the frameworks has none.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        # XLA's size for its thread pool. Callbacks of interpreted kernels wait for each other on
        # that pool, and with as few threads as a small machine has cores they deadlock.
        os.environ.setdefault("NPROC", "16")
        import jax

        jax.config.update("jax_platforms", "cpu")
        return device
    if not torch.cuda.is_available():
        sys.exit(
            "--device cuda: torch sees no GPU; install a CUDA build of torch or use --device cpu"
        )
    # Both frameworks share the card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "gpu":
        sys.exit(
            "--device cuda: jax sees no GPU; pip install 'jax-dora[cuda13]' or use --device cpu"
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in COMMANDS:
        return importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:])
    options = parse(arguments)
    device = set_up(options.device)

    import torch
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from parity import cases
    from parity.compare import run_case
    from parity.encoder import CASE as encoder_case
    from parity.encoder import run_encoder
    from parity.report import Report

    chosen = cases.cpu_cases() if device == "cpu" else cases.gpu_cases()
    chosen = cases.quick(chosen) if options.quick else chosen
    chosen = [c for c in chosen if c.level in options.level and re.search(options.case, c.name)]
    encoder = "encoder" in options.level and re.search(options.case, encoder_case) is not None
    names = [case.name for case in chosen] + [encoder_case] * encoder
    if not names:
        sys.exit(f"no case matches --case {options.case!r} at level {' or '.join(options.level)}")
    console = Console(width=None if sys.stdout.isatty() else 150)
    if options.list:
        console.print("\n".join(names), highlight=False)
        return 0

    folder = options.out or Path(__file__).parent / "reports" / device
    report = Report(device, commit=options.commit)
    progress_console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console) as progress:
        task = progress.add_task("", total=len(names))

        @contextlib.contextmanager
        def timed(name: str) -> Iterator[None]:
            progress.update(task, description=name)
            start = time.perf_counter()
            yield
            report.seconds[name] = time.perf_counter() - start
            progress.advance(task)
            if not progress_console.is_terminal:  # a log gets a line a case
                done = f"[{len(report.seconds)}/{len(names)}] {name}: {report.seconds[name]:.1f} s"
                print(done, file=sys.stderr, flush=True)

        for case in chosen:
            with timed(case.name):
                report.rows += run_case(case, device)
            if device == "cuda":
                torch.cuda.empty_cache()  # jax allocates from the same card
        if encoder:
            with timed(encoder_case):
                run_encoder(report, device, folder, quick=options.quick)

    report.write(folder)
    report.print(console)
    console.print(f"written: {folder / 'parity.md'}, {folder / 'parity.json'}", highlight=False)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
