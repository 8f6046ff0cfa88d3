"""`python -m parity`: both packages against each other and against fp64; exit code 1 on failure."""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import sys
import time
from collections.abc import Callable, Sequence

from parity import command, minilm
from parity.environment import choose_device
from parity.report import Report

LEVELS = ("operator", "layer", "encoder")
# What the first word may ask for instead: a module whose `main(arguments)` returns the exit code.
COMMANDS = {
    "model": "parity.model.command",
    "training": "parity.training.command",
    "sharded": "parity.sharded",
    "quantised": "parity.quantised",
    "bank": "parity.bank",
    "controls": "parity.controls",
    "report": "parity.report",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.parser(
        "",
        "Runs the same weights, inputs and cotangents through jax_dora and torch_dora, and "
        "compares both with a materialised fp64 computation. A report a level, which a run that "
        "is stopped leaves as far as it came.",
        epilog="`python -m parity {model,training,sharded,quantised,bank,controls,report} --help`: "
        "whole models, training runs, several devices, quantised weights, many adapters at once, "
        "the proof that each level catches planted faults, and tables of a report.",
    )
    parser.add_argument("--level", action="append", choices=LEVELS, help="only this; repeatable")
    only = "only cases whose name has this regular expression"
    parser.add_argument("--case", default="", type=command.expression, help=only)
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    options = parser.parse_args(arguments)
    options.level = options.level or list(LEVELS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in COMMANDS:
        return importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:])
    options = parse(arguments)
    device = choose_device(options.device)
    work = _work(options, device)
    if not work:
        levels = " or ".join(options.level)
        sys.exit(f"no case matches --case {options.case!r} at level {levels}")
    if options.list:
        print("\n".join(name for _, name, _ in work))
        return 0
    if any(level == "encoder" for level, _, _ in work):
        try:
            minilm.folder()  # what is missing is told before the first case, not after the last
        except FileNotFoundError as error:
            sys.exit(f"python -m parity: {error}, or leave it out: --level operator --level layer")
    return _run(options, device, work)


# A level, a case's name, and what adds it to the level's report.
Work = list[tuple[str, str, Callable]]


def _work(options: argparse.Namespace, device: str) -> Work:
    from parity import cases
    from parity.compare import run_case
    from parity.encoder import CASE, run_encoder

    chosen = cases.cpu_cases() if device == "cpu" else cases.gpu_cases()
    chosen = cases.quick(chosen) if options.quick else chosen
    found: Work = [
        (case.level, case.name, functools.partial(run_case, case=case, device=device))
        for case in chosen
    ]
    encode = functools.partial(run_encoder, device=device, quick=options.quick)
    found.append(("encoder", CASE, encode))
    return [w for w in found if w[0] in options.level and re.search(options.case, w[1])]


def _run(options: argparse.Namespace, device: str, work: Work) -> int:
    import torch

    reports: dict[str, Report] = {}
    for number, (level, name, add) in enumerate(work, 1):
        if level not in reports:
            reports[level] = command.report(options, device, level)
        start = time.perf_counter()
        add(reports[level])
        seconds = time.perf_counter() - start
        reports[level].add(name, "seconds", value=seconds)
        print(f"[{number}/{len(work)}] {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()  # jax allocates from the same card
    return max([report.finish() for report in reports.values()])


if __name__ == "__main__":
    sys.exit(main())
