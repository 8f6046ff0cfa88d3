"""Parsers of flags with ranges, whose errors take one line."""

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NoReturn

from dora_common.hyperparameters import LARGEST, LEAST
from jax_dora.ops.quantised import FORMATS
from jax_dora.ops.row_wise import QTYPE

AXES = ("dp", "fsdp", "tp")
# Patterns of the library's errors, and what stands in their place: flags.
_FLAGS = {
    r"\bact_qtype\b": "--activations",
    r"\bquantize(?= is |=)": "--quantize",
    r"\bqtype(?= ')": "--quantize",
    r"give tile_size=.*": "give --quantize int8 or float8_e4m3fn, which have no tiles",
    r"\bmax_length(?= is )": "--max-length",
    r"the bank's max_rank: make the bank with": "--max-rank: start the server with",
    r"rules\[\d+\], path(?= ')": "--target",
    r"say which of its axes.*narrow the rules' paths so that they leave": (
        "narrow --target so that it leaves"
    ),
    r"pass (?=adapter\w*=')": "pass jax_dora.peft.load_adapter ",
}
MOST = 2**31 - 1  # what an index into an array may be


class UsageError(Exception):
    """A flag, a file or a folder that the person who gave it can correct."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse prints the usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists all)")


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is out of range: expected a whole number from {least:,} to {most:,}"
            )
        return value

    return parse


def number(told: str, is_right: Callable[[float], bool]) -> Callable[[str], float]:
    """Returns a parser of the numbers of float32 for which `is_right`; `told` describes them in its
    error."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_right(value):
            raise argparse.ArgumentTypeError(f"{text!r} is out of range: expected a number {told}")
        if value and not LEAST <= abs(value) <= LARGEST:
            raise argparse.ArgumentTypeError(
                f"{text!r} is out of range: expected a number {told}; float32 holds 0 and sizes "
                f"from {LEAST:.1e} to {LARGEST:.1e}"
            )
        return value

    return parse


positive = number("above 0", lambda value: value > 0)
not_negative = number("of at least 0", lambda value: value >= 0)
rate = number("from 0 to below 1", lambda value: 0 <= value < 1)
share = number("above 0, to 1", lambda value: 0 < value <= 1)


def add_formats(add: Callable[..., object], *, activations: bool = False) -> None:
    """Adds --dtype and --quantize, and --activations where that is asked for."""
    add("--dtype", choices=("bfloat16", "float32"), help="of the base; config.json's by default")
    add("--quantize", choices=FORMATS, help="the base's projections, as they are read")
    if activations:
        told = "what they take; beside --quantize of that format"
        add("--activations", choices=(QTYPE,), help=told)


def folder(text: str) -> Path:
    """Parses the path of a folder to write; an empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; expected a folder, . for the current one")
    return Path(text)


def mesh(text: str) -> dict[str, int] | Literal["auto"]:
    """Parses the sizes of a mesh's axes, such as "fsdp=2,tp=4", or "auto"."""
    if text == "auto":
        return text
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no mesh: expected auto, or sizes of {', '.join(AXES)} of at least 1, "
                "as in fsdp=4,tp=2"
            )
        sizes[name] = int(size)
    return sizes


def pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def with_flags(told: str) -> str:
    """Returns an error's text with flags in the place of the library's arguments."""
    for argument, flag in _FLAGS.items():
        told = re.sub(argument, flag, told)
    return told


@contextlib.contextmanager
def corrections() -> Iterator[None]:
    """Turns errors about flags and files into `UsageError`, which names flags, while it lasts."""
    try:
        yield
    except FileExistsError as error:
        told = str(error)
        if error.filename is not None:
            told = f"{error.filename} is a file; expected a folder, or none"
        raise UsageError(told) from error
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise UsageError(with_flags(str(error))) from error
    except OSError as error:
        wrong = FileNotFoundError | PermissionError | NotADirectoryError
        if error.errno is None or isinstance(error, wrong):
            raise UsageError(str(error)) from error
        raise
