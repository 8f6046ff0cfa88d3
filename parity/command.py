"""The command lines of `python -m parity`, and the report that each begins.

They are read before the packages are imported: Triton asks as it is imported whether its kernels
are to be interpreted.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parity.environment import environment
from parity.report import Report

REPORTS = Path(__file__).parent / "reports"
LEVELS = ("operator", "layer", "encoder")
CONTROLLED = (*LEVELS, "model", "training")


class Command(NamedTuple):
    """What a first word asks for.

    Attributes:
      module: its `main(options)`, the device chosen, returns the exit code.
      flags: adds those that are its own to a parser.
    """

    module: str
    description: str
    flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a command of `COMMANDS`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m parity {name}".strip(), description=COMMANDS[name].description
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cpu interprets the kernels at small sizes; cuda runs them at the paper's",
    )
    parser.add_argument("--out", type=Path, help="report folder; default parity/reports/<device>")
    parser.add_argument("--quick", action="store_true", help="a small run of every kind")
    parser.add_argument("--commit", help="to record in the report, where there is no git checkout")
    COMMANDS[name].flags(parser)
    return parser.parse_args(arguments)


def report(
    options: argparse.Namespace, level: str, packages: Sequence[str] = (), **facts: Any
) -> Report:
    """Begins the report of a level that the options ask for."""
    described = environment(options.device, options.commit, packages)
    folder = options.out or REPORTS / options.device
    return Report(folder / f"{level}.jsonl", level, described, **facts)


def _levels(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "`python -m parity {model,training,sharded,quantised,bank,controls,report} --help`: whole "
        "models, training runs, several devices, quantised weights, many adapters at once, the "
        "proof that each level catches planted faults, and tables of a report."
    )
    parser.add_argument("--level", action="append", choices=LEVELS, help="only this; repeatable")
    only = "only cases whose name has this regular expression"
    parser.add_argument("--case", default="", type=_expression, help=only)
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=_at_least(1), help="of every run, in place of its own")
    parser.add_argument("--sequence", type=_at_least(1), help="tokens of every run")
    parser.add_argument("--dtype", choices=("bf16", "fp32", "both"), default="both")


def _training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=_at_least(2), help="of every run; 2000, or 40 with --quick")
    parser.add_argument("--seeds", type=int, nargs="+", help="default 1 2 3, or 1 with --quick")
    only = "only variants whose name, such as 'torch triton', has this regular expression"
    parser.add_argument("--variant", default="", type=_expression, help=only)
    at_a_time = "runs at a time; default 6 on a GPU and 1 on a CPU"
    parser.add_argument("--jobs", type=_at_least(1), help=at_a_time)


def _controls(parser: argparse.ArgumentParser) -> None:
    once = "only this; repeatable"
    parser.add_argument("--level", action="append", choices=CONTROLLED, help=once)
    parser.add_argument("--fault", action="append", help=once)


def _expression(text: str) -> str:
    """Returns the text, which must be a regular expression, to argparse."""
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


COMMANDS = {
    "": Command(
        "parity.levels",
        "Runs the same weights, inputs and cotangents through jax_dora and torch_dora, and "
        "compares both with a materialised fp64 computation. A report a level, which a run that "
        "is stopped leaves as far as it came.",
        _levels,
    ),
    "model": Command(
        "parity.model.command",
        "Runs one decoder with one DoRA adapter through Flax and jax_dora, through transformers "
        "and torch_dora, through transformers and PEFT, and densely in fp64, and compares logits "
        "and the adapter's gradients.",
        _model,
    ),
    "training": Command(
        "parity.training.command",
        "Trains the same DoRA adapter in JAX and in torch, from the same initial state on the same "
        "batches, and compares losses, gradient norms and adapters. --quick: a tiny model, one "
        "seed, few steps.",
        _training,
    ),
    "sharded": Command("parity.sharded", "Holds a layer on four devices to fp64, in every layout."),
    "quantised": Command(
        "parity.quantised",
        "Holds layers over the same quantised weights to fp64, in both packages and PEFT.",
    ),
    "bank": Command("parity.bank", "Holds the rows of mixed batches to fp64, each by its adapter."),
    "controls": Command(
        "parity.controls",
        "Plants known errors in each package and shows which level of parity catches which; on "
        "the CPU.",
        _controls,
    ),
}
