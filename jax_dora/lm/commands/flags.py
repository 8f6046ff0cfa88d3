"""Parsers for the values of flags, and errors about flags in one line."""

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

from dora_common.hyperparameters import LARGEST, LEAST
from jax_dora.ops.quantised import FORMATS
from jax_dora.ops.row_scaled import QTYPE

AXES = ("dp", "fsdp", "tp")
# Patterns in error messages of the library, and their replacements, which name flags.
_FLAGS = {
    r"\bact_qtype\b": "--activations",
    r"\bquantize(?= is |=)": "--quantize",
    r"\bqtype(?= ')": "--quantize",
    r"choose (int8 or float8_e4m3fn, which need no tiles).*": r"pass --quantize \1",
    r"pass that qtype and no tile_size": f"pass --quantize {QTYPE}",
    r"\bbatch(?= is \d+, but)": "--batch",
    r"\bmax_length(?= is )": "--max-length",
    r"\bend_tokens\b": "--end-token",
    r"rules\[\d+\], path(?= ')": "--target",
    r"name the contracted axes.*narrow the rules' paths so that they do not match": (
        "narrow --target so that it does not match"
    ),
    r"pass (?=adapter\w*=')": "pass jax_dora.peft.load_adapter ",
}
MAX_INTEGER = 2**31 - 1  # the largest index of an array


class UsageError(Exception):
    """An error in a flag, a file or a folder that the user can correct."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print the usage and exit.

    It also raises it for a flag that is given twice, of which argparse would use the last value.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.given: set[str] = set()
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        self.given.clear()
        return super().parse_known_args(*args, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class _StoreOnce(argparse.Action):
    """Stores the value of a flag that can be given once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        if self.dest in parser.given:
            raise argparse.ArgumentError(self, "it is given twice; expected one value")
        parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of descriptions, and adds defaults to the help of flags."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default == argparse.SUPPRESS:
            return action.help
        return f"{action.help} [default: %(default)s]"


def integer(least: int, most: int = MAX_INTEGER) -> Callable[[str], int]:
    """Returns a parser of integers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is out of range: expected an integer from {least:,} to {most:,}"
            )
        return value

    return parse


def number(expected: str, is_valid: Callable[[float], bool]) -> Callable[[str], float]:
    """Returns a parser of float32 numbers for which `is_valid` is true.

    `expected` describes these numbers in the error message.
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_valid(value):
            raise argparse.ArgumentTypeError(
                f"{text!r} is out of range: expected a number {expected}"
            )
        if value and not LEAST <= abs(value) <= LARGEST:
            raise argparse.ArgumentTypeError(
                f"{text!r} is out of range: expected a number {expected} that is 0 or has a "
                f"magnitude from {LEAST:.1e} to {LARGEST:.1e}, the range of float32"
            )
        return value

    return parse


positive = number("above 0", lambda value: value > 0)
not_negative = number("of at least 0", lambda value: value >= 0)
rate = number("from 0 to below 1", lambda value: 0 <= value < 1)
share = number("above 0 and at most 1", lambda value: 0 < value <= 1)


def add_formats(add: Callable[..., object], *, activations: bool = False) -> None:
    """Adds the flags --dtype and --quantize, and --activations if `activations` is True."""
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of the base model; config.json's by default",
    )
    add("--quantize", choices=FORMATS, help="quantize the base model's projections on loading")
    if activations:
        add(
            "--activations",
            choices=(QTYPE,),
            help="also quantize the inputs of projections; needs weights in the same format",
        )


def add_end_token(add: Callable[..., object], *, more: str = "") -> None:
    """Adds the flag --end-token, with `more` at the end of its help."""
    add(
        "--end-token",
        action="append",
        metavar="TOKEN",
        help="text or id of a further token that ends an answer; can be repeated" + more,
    )


def folder(text: str) -> Path:
    """Parses the path of an output folder. An empty path would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; expected a folder, or . for the current one")
    return Path(text)


def mesh(*axes: str) -> Callable[[str], dict[str, int] | Literal["auto"]]:
    """Returns a parser of the sizes of a mesh's axes, such as "fsdp=2,tp=4", or "auto".

    Errors list `axes`, which the command accepts. The other axes of a model's mesh are parsed too,
    since the command's own error says why it refuses them.
    """
    example = ",".join(f"{axis}=2" for axis in axes[-2:])

    def parse(text: str) -> dict[str, int] | Literal["auto"]:
        if text == "auto":
            return text
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.partition("=")
            if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
                raise argparse.ArgumentTypeError(
                    f"{text!r} is not a mesh: expected auto, or sizes of {', '.join(axes)} of at "
                    f"least 1, as in {example}"
                )
            sizes[name] = int(size)
        return sizes

    return parse


def pattern(text: str) -> str:
    """Parses a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a regular expression: {error}"
        ) from error
    return text


def with_flag_names(message: str) -> str:
    """Returns an error message of the library with flags instead of the library's arguments."""
    for argument, flag in _FLAGS.items():
        message = re.sub(argument, flag, message)
    return message


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns errors about flags and files inside the block into `UsageError`, which names flags."""
    try:
        yield
    except FileExistsError as error:
        message = str(error)
        if error.filename is not None:
            message = f"{error.filename} is a file; expected a folder, or no file of that name"
        raise UsageError(message) from error
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise UsageError(with_flag_names(str(error))) from error
    except OSError as error:
        path_errors = FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError
        if error.errno is None or isinstance(error, path_errors):
            raise UsageError(str(error)) from error
        raise
