"""The command lines of `python -m parity`, and the start of a report.

They are parsed before the packages are imported: Triton decides at import whether to interpret
kernels.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parity.environment import environment
from parity.report import Report

# In the current folder. Those of parity/reports are committed, and pages show their numbers.
REPORTS = Path("parity-reports")
LEVELS = ("operator", "layer", "quantised", "bank")
CONTROLLED = ("operator", "layer", "model", "training")

# The command's module by the first word of the command line. Its `main(options)` is called after
# the device is set up and returns the exit code.
MODULES = {
    "": "parity.levels",
    "model": "parity.model.systems",
    "training": "parity.training.variants",
    "sharded": "parity.sharded",
    "quantised": "parity.levels",
    "bank": "parity.levels",
    "vllm": "parity.levels",
    "controls": "parity.controls",
}
DESCRIPTIONS = {
    "": "Runs the same weights, inputs and cotangents through jax_dora and torch_dora, and "
    "compares both with a dense fp64 computation. Writes one report per level; an interrupted run "
    "keeps the results so far.",
    "model": "Runs one decoder with one DoRA adapter through Flax and jax_dora, through "
    "transformers and torch_dora, through transformers and PEFT, and through a dense fp64 "
    "computation, and compares logits and the adapter's gradients.",
    "training": "Trains the same DoRA adapter in JAX and in torch, from the same initial state on "
    "the same batches, and compares losses, gradient norms and adapters. --quick: a tiny model, "
    "one seed, few steps.",
    "sharded": "Compares a layer on four devices with fp64, in every layout.",
    "quantised": "Compares layers over quantised weights with fp64, in both packages and in PEFT.",
    "bank": "Compares the rows of mixed batches, which use different adapters, with fp64, in both "
    "packages and in PEFT.",
    "vllm": "Compares answers of vLLM with torch_dora's plugin, of both packages' banks and of "
    "PEFT with fp64, for the same folders. Needs vLLM (make setup-vllm).",
    "controls": "Plants known errors in each package and shows which levels of parity catch them; "
    "on the CPU.",
}


def program(name: str) -> str:
    return f"python -m parity {name}".strip()


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of the command called `name`."""
    parser = argparse.ArgumentParser(prog=program(name), description=DESCRIPTIONS[name])
    flag = parser.add_argument
    if name == "controls":
        flag("--device", choices=("cpu",), default="cpu", help="the controls run on the CPU only")
    else:
        device = "cpu interprets the kernels at small sizes; cuda runs them at the paper's"
        flag("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device)
        flag("--quick", action="store_true", help="a small run of every kind")
    flag("--out", type=Path, help=f"report folder; default {REPORTS}/<device>")
    flag("--commit", help="the commit to record in the report, outside a git checkout")
    only = "only this one; can be repeated"
    match name:
        case "":
            parser.epilog = (
                "`python -m parity {model,training,sharded,controls,report} --help`: whole models, "
                "training runs, several devices, the check that each level catches planted faults, "
                "and the tables of a report."
            )
            flag("--level", action="append", choices=LEVELS, help=only)
            _add_case_flags(parser)
        case "quantised" | "bank" | "vllm":
            parser.set_defaults(level=[name])
            _add_case_flags(parser)
        case "model":
            flag("--layers", type=_at_least(1), help="the number of layers of every run")
            flag("--sequence", type=_at_least(1), help="the number of tokens of every run")
            flag("--dtype", choices=("bf16", "fp32", "both"), default="both")
        case "training":
            steps = "the number of steps of every run; default 2000, or 40 with --quick"
            flag("--steps", type=_at_least(2), help=steps)
            flag("--seeds", type=int, nargs="+", help="default 1 2 3, or 1 with --quick")
            only = "only variants whose name, such as 'torch triton', matches this regex"
            flag("--variant", default="", type=_expression, help=only)
            jobs = "the number of parallel runs; default 6 on a GPU and 1 on a CPU"
            flag("--jobs", type=_at_least(1), help=jobs)
        case "controls":
            flag("--level", action="append", choices=CONTROLLED, help=only)
            flag("--fault", action="append", help=only)
    return parser.parse_args(arguments)


def report(
    options: argparse.Namespace, level: str, packages: Sequence[str] = (), **facts: Any
) -> Report:
    """Starts the report of a level, in the folder that the options name."""
    described = environment(options.device, options.commit, packages)
    folder = options.out or REPORTS / options.device
    return Report(folder / f"{level}.jsonl", level, described, **facts)


def _add_case_flags(parser: argparse.ArgumentParser) -> None:
    case = "only cases whose name matches this regular expression"
    parser.add_argument("--case", default="", type=_expression, help=case)
    shown = "print the names of the cases and exit"
    parser.add_argument("--list", action="store_true", help=shown)


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        message = f"{text!r} is not a regular expression: {error}"
        raise argparse.ArgumentTypeError(message) from error
    return text


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse_integer(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {minimum}")
        return int(text)

    return parse_integer
