"""Parsers for the values of flags, and errors about flags in one line."""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from jax_dora.lm.domains import Domain
from jax_dora.lm.finetune.settings import Settings
from jax_dora.lm.models.sharding import AXES
from jax_dora.quantisation import QTYPE

# Patterns in error messages of the core, and their replacements, which name settings.
_PHRASES = {
    r"(?<!`)\b(act_qtype|bwd_qtype|end_tokens)\b(?![`=])": r"`\1`",
    r"\bquantize(?= is )": "`quantize`",
    r"\bqtype(?= ')": "`quantize`",
    r"choose (int8 or float8_e4m3fn, which need no tiles).*": r"pass `quantize` \1",
    r"pass that qtype and no tile_size": f"pass `quantize` {QTYPE}",
    r"rules\[\d+\], path(?= ')": "`target`",
    r"name the contracted axes.*narrow the rules' paths so that they do not match": (
        "narrow `target` so that it does not match"
    ),
    r"pass (?=adapter\w*=')": "pass jax_dora.peft.load_adapter ",
}


INTERRUPTED = 130  # exit status


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


def in_domain(domain: Domain) -> Callable[[str], Any]:
    """Returns a parser of the values of a domain."""

    def parse(text: str) -> Any:
        try:
            value = domain.kind(text)
        except ValueError:
            value = None
        if not domain.contains(value):
            raise argparse.ArgumentTypeError(
                f"{text!r} is out of range: expected {domain.expected}"
            )
        return value

    return parse


def add_setting(
    add: Callable[..., object], settings: Any, name: str, flag: str = "", **options: Any
) -> None:
    """Adds a flag for a field of a dataclass of settings.

    The help is the field's entry under "Attributes:", and the default is the field's. The dataclass
    checks the value.

    Args:
      add: a method `add_argument`.
      settings: the dataclass. `DOMAINS` has the domains of its fields by their names.
      flag: the flag; the field's name by default.
      options: further arguments of `add`.
    """
    default = settings.__dataclass_fields__[name].default
    given: dict[str, Any] = {"dest": name, "help": _documentation(settings)[name]}
    if default is dataclasses.MISSING:
        given["required"] = True
    else:
        given["default"] = None if default == () else default  # argparse appends to lists only
    if default is False:
        given["action"] = "store_true"
    elif (domain := settings.DOMAINS.get(name)) is not None:
        given["type"] = domain.kind
        if domain.choices:
            given["choices"] = domain.choices
        else:
            given["metavar"] = {int: "N", float: "X"}[domain.kind]
    add(flag or _flag(name), **given | options)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@functools.cache
def _documentation(settings: Any) -> dict[str, str]:
    """Returns the entries under "Attributes:" of a dataclass."""
    section = (inspect.getdoc(settings) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in entries}


def make_settings[T](settings: type[T], args: argparse.Namespace) -> T:
    """Returns a dataclass of settings with the values of its flags."""
    names = [field.name for field in dataclasses.fields(settings)]  # pyright: ignore
    values = {name: getattr(args, name, None) for name in names}
    return settings(**{name: value for name, value in values.items() if value is not None})


def add_formats(
    add: Callable[..., object], settings: Any = Settings, *, activations: bool = False
) -> None:
    """Adds the flags --dtype and --quantize, and --activations if `activations` is True."""
    add_setting(add, settings, "dtype")
    add_setting(add, settings, "quantize")
    if activations:
        add_setting(add, settings, "act_qtype", "--activations")


def add_end_token(add: Callable[..., object], settings: Any = Settings) -> None:
    """Adds the flag --end-token."""
    options = {"action": "append", "metavar": "TOKEN"}
    add_setting(add, settings, "end_tokens", "--end-token", **options)


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


def columns(text: str) -> dict[str, str]:
    """Parses names by names, such as "prompt=question,completion=answer"."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and column for name, _, column in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no names: expected prompt=NAME,completion=NAME, or other fields"
        )
    return {name: column for name, _, column in pairs}


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Returns the flags of a command by the names of the settings that they set."""
    return {one.dest: one.option_strings[-1] for one in parser._actions if one.option_strings}


def with_flag_names(message: str, flags: Mapping[str, str]) -> str:
    """Returns a message of the library with flags instead of the names of settings.

    The library writes "name=value", or "`name`" for a setting without a value.

    Args:
      flags: the flags by the names of the settings, of `flags_of`.
    """
    for phrase, setting in _PHRASES.items():
        message = re.sub(phrase, setting, message)
    names = "|".join(map(re.escape, flags))
    message = re.sub(rf"`({names})`", lambda found: flags[found[1]], message)
    # Only at the beginning of a word, since a path may have the same form.
    return re.sub(
        rf"(?<![^\s(])({names})=(True\b)?",
        lambda found: flags[found[1]] + ("" if found[2] else " "),
        message,
    )


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns errors about settings and files inside the block into `UsageError`."""
    try:
        yield
    except FileExistsError as error:
        message = str(error)
        if error.filename is not None:
            message = f"{error.filename} is a file; expected a folder, or no file of that name"
        raise UsageError(message) from error
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        path_errors = FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError
        if error.errno is None or isinstance(error, path_errors):
            raise UsageError(str(error)) from error
        raise
