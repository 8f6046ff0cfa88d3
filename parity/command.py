"""The command lines of `python -m parity`, and the report that each begins.

They are read before the packages are imported: Triton asks as it is imported whether its kernels
are to be interpreted.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parity.environment import environment
from parity.report import Report

REPORTS = Path(__file__).parent / "reports"
LEVELS = ("operator", "layer", "encoder")
CONTROLLED = (*LEVELS, "model", "training")

# By the first word of a command line, the module whose `main(options)`, called with the device
# chosen, returns the exit code.
MODULES = {
    "": "parity.levels",
    "model": "parity.model.command",
    "training": "parity.training.command",
    "sharded": "parity.sharded",
    "quantised": "parity.quantised",
    "bank": "parity.bank",
    "controls": "parity.controls",
}
DESCRIPTIONS = {
    "": "Runs the same weights, inputs and cotangents through jax_dora and torch_dora, and "
    "compares both with a materialised fp64 computation. A report a level, which a run that is "
    "stopped leaves as far as it came.",
    "model": "Runs one decoder with one DoRA adapter through Flax and jax_dora, through "
    "transformers and torch_dora, through transformers and PEFT, and densely in fp64, and "
    "compares logits and the adapter's gradients.",
    "training": "Trains the same DoRA adapter in JAX and in torch, from the same initial state on "
    "the same batches, and compares losses, gradient norms and adapters. --quick: a tiny model, "
    "one seed, few steps.",
    "sharded": "Holds a layer on four devices to fp64, in every layout.",
    "quantised": "Holds layers over the same quantised weights to fp64, in both packages and PEFT.",
    "bank": "Holds the rows of mixed batches to fp64, each by its adapter.",
    "controls": "Plants known errors in each package and shows which level of parity catches "
    "which; on the CPU.",
}


def program(name: str) -> str:
    return f"python -m parity {name}".strip()


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of the command of this name."""
    parser = argparse.ArgumentParser(prog=program(name), description=DESCRIPTIONS[name])
    flag = parser.add_argument
    device = "cpu interprets the kernels at small sizes; cuda runs them at the paper's"
    flag("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device)
    flag("--out", type=Path, help="report folder; default parity/reports/<device>")
    flag("--quick", action="store_true", help="a small run of every kind")
    flag("--commit", help="to record in the report, where there is no git checkout")
    only = "only this; repeatable"
    match name:
        case "":
            parser.epilog = (
                "`python -m parity {model,training,sharded,quantised,bank,controls,report} "
                "--help`: whole models, training runs, several devices, quantised weights, many "
                "adapters at once, the proof that each level catches planted faults, and tables "
                "of a report."
            )
            flag("--level", action="append", choices=LEVELS, help=only)
            case = "only cases whose name has this regular expression"
            flag("--case", default="", type=_expression, help=case)
            flag("--list", action="store_true", help="print the names of the cases and stop")
        case "model":
            flag("--layers", type=_at_least(1), help="of every run, in place of its own")
            flag("--sequence", type=_at_least(1), help="tokens of every run")
            flag("--dtype", choices=("bf16", "fp32", "both"), default="both")
        case "training":
            flag("--steps", type=_at_least(2), help="of every run; 2000, or 40 with --quick")
            flag("--seeds", type=int, nargs="+", help="default 1 2 3, or 1 with --quick")
            only = "only variants whose name, such as 'torch triton', has this regular expression"
            flag("--variant", default="", type=_expression, help=only)
            jobs = "runs at a time; default 6 on a GPU and 1 on a CPU"
            flag("--jobs", type=_at_least(1), help=jobs)
        case "controls":
            flag("--level", action="append", choices=CONTROLLED, help=only)
            flag("--fault", action="append", help=only)
    return parser.parse_args(arguments)


def report(
    options: argparse.Namespace, level: str, packages: Sequence[str] = (), **facts: Any
) -> Report:
    """Begins the report of a level that the options ask for."""
    described = environment(options.device, options.commit, packages)
    folder = options.out or REPORTS / options.device
    return Report(folder / f"{level}.jsonl", level, described, **facts)


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def _at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return whole
