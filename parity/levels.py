"""The levels of `python -m parity` alone: operators, layers and a pretrained encoder."""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator

import torch

from parity import cases, command, minilm
from parity.compare import run_case
from parity.encoder import CASE, run_encoder
from parity.report import Report


def main(options: argparse.Namespace) -> int:
    levels = options.level or command.LEVELS
    work = [w for w in _work(options) if w[0] in levels and re.search(options.case, w[1])]
    if not work:
        sys.exit(f"no case matches --case {options.case!r} at level {' or '.join(levels)}")
    if options.list:
        print("\n".join(name for _, name, _ in work))
        return 0
    if work[-1][0] == "encoder":
        try:
            minilm.folder()  # what is missing is told before the first case, not after the last
        except FileNotFoundError as error:
            sys.exit(f"python -m parity: {error}, or leave it out: --level operator --level layer")
    reports: dict[str, Report] = {}
    for number, (level, name, add) in enumerate(work, 1):
        if level not in reports:
            reports[level] = command.report(options, level)
        start = time.perf_counter()
        add(reports[level])
        seconds = time.perf_counter() - start
        reports[level].add(name, "seconds", value=seconds)
        print(f"[{number}/{len(work)}] {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()  # jax allocates from the same card
    return max([report.finish() for report in reports.values()])


def _work(options: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[Report], None]]]:
    """Yields a level, a case's name, and what adds it to the level's report."""
    chosen = cases.cpu_cases() if options.device == "cpu" else cases.gpu_cases()
    for case in cases.quick(chosen) if options.quick else chosen:
        yield case.level, case.name, functools.partial(run_case, case=case, device=options.device)
    encode = functools.partial(run_encoder, device=options.device, quick=options.quick)
    yield "encoder", CASE, encode
