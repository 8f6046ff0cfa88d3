"""The common part of the command lines of `python -m parity`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parity.environment import environment
from parity.report import Report

REPORTS = Path(__file__).parent / "reports"


def parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Returns a parser that knows --device, --out, --quick and --commit."""
    made = argparse.ArgumentParser(
        prog=f"python -m parity {command}".strip(), description=description, epilog=epilog
    )
    made.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cpu interprets the kernels at small sizes; cuda runs them at the paper's",
    )
    made.add_argument("--out", type=Path, help="report folder; default parity/reports/<device>")
    made.add_argument("--quick", action="store_true", help="a small run of every kind")
    made.add_argument("--commit", help="to record in the report, where there is no git checkout")
    return made


def report(
    options: argparse.Namespace, device: str, level: str, packages: Sequence[str] = (), **facts: Any
) -> Report:
    """Begins the report of a level that `parser`'s options ask for."""
    described = environment(device, options.commit, packages)
    return Report((options.out or REPORTS / device) / f"{level}.jsonl", level, described, **facts)


def expression(text: str) -> str:
    """Returns the text, which must be a regular expression, to argparse."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive integer")
    return int(text)
