"""Runs the command line, and turns errors into one line and an exit status."""

import argparse
import errno
import io
import re
import sys
import traceback
from collections.abc import Sequence
from typing import cast

import jax
from rich.console import Console

from jax_dora.lm.commands import finetune, generate, inspect, merge, serve
from jax_dora.lm.commands.flags import (
    INTERRUPTED,
    HelpFormatter,
    Parser,
    UsageError,
    flags_of,
    usage_errors,
    with_flag_names,
)
from jax_dora.lm.commands.settings_file import read_settings
from jax_dora.lm.finetune import processes
from jax_dora.lm.finetune.processes import FirstStoppedError
from jax_dora.lm.finetune.stopping import DivergedError
from jax_dora.lm.models import NotFiniteError

FAILED, USAGE = 1, 2
# Of JAX's errors when another process does not answer. Their types are general.
_LOST = re.compile(r"\b([Gg]loo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED)\b")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMMANDS = (finetune, generate, merge, inspect, serve)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the values of a command's flags: those of `argv`, then those of --settings."""
    args = parser().parse_args(argv)
    if (file := getattr(args, "settings", None)) is None:
        return args
    without_defaults = parser()
    [commands] = (one for one in without_defaults._actions if isinstance(one.choices, dict))
    command = cast(dict[str, argparse.ArgumentParser], commands.choices)["finetune"]
    for action in command._actions:
        action.default = argparse.SUPPRESS
    given = vars(without_defaults.parse_args(argv))
    with usage_errors():
        return argparse.Namespace(**vars(args) | read_settings(file, command) | given)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    result = Parser(prog="jax-dora", description="DoRA for Llama, Mistral and Qwen models on JAX.")
    commands = result.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name,
            help=(module.__doc__ or "").partition("\n")[0],
            description=module.__doc__,
            formatter_class=HelpFormatter,
        )
        module.add_flags(command)
        flags = flags_of(command)
        for action in command._actions:
            action.help = with_flag_names(action.help or "", flags)
        command.set_defaults(run=module.run, flags=flags)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      The exit status: 0 for success; 1 if training diverged, logits are not finite, the disk is
      full or memory ran out; 2 for invalid flags, data or folders; 130 for Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the terminal's encoding lacks are printed as escape sequences.
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(stderr=True)
    flags: dict[str, str] = {}
    try:
        args = parse(argv)
        flags = args.flags
        return args.run(args)
    except (Exception, KeyboardInterrupt) as error:
        status, message = _explain(error)
        notes = " ".join(getattr(error, "__notes__", ()))
        line = " ".join(f"{message}{'. ' if notes else ''}{notes}".split())
        line = with_flag_names(line, flags)
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        if jax.distributed.is_initialized():
            processes.leave(status)
        return status


def _explain(error: BaseException) -> tuple[int, str]:
    """Returns the exit status and the message for an error, or raises an unexpected error again."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED, "Interrupted"
        case UsageError():
            return USAGE, f"Error: {error}"
        case DivergedError() | FirstStoppedError() | NotFiniteError():
            return FAILED, f"Stopped: {error}"
        case MemoryError():
            return FAILED, f"Out of memory: {error or 'the host has too little memory'}"
        case jax.errors.JaxRuntimeError() if "RESOURCE_EXHAUSTED" in str(error):
            first = str(error).partition("\n")[0]
            return FAILED, f"Out of memory on the device: {first}"
        case RuntimeError() | ValueError() if _LOST.search(str(error)):
            first = str(error).partition("\n")[0]
            return FAILED, f"Stopped: another process has ended or is lost ({first})"
        case OSError():
            is_full = error.errno in FULL
            what = "The disk is full" if is_full else "A file could not be read or written"
            return FAILED, f"{what}: {error}"
    if jax.distributed.is_initialized():
        traceback.print_exception(error)
        return FAILED, "Stopped: this process has failed"
    raise error
