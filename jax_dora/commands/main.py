"""The command line, and what each way to fail says and exits with."""

import argparse
import errno
import io
import sys
from collections.abc import Sequence

import jax
from rich.console import Console

from jax_dora.commands import finetune, generate, inspect, merge, serve
from jax_dora.commands.flags import Parser, UsageError
from jax_dora.finetune.guard import DivergedError
from jax_dora.finetune.processes import FirstStoppedError
from jax_dora.models import NotFiniteError

FAILED, USAGE, INTERRUPTED = 1, 2, 130
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMMANDS = (finetune, generate, merge, inspect, serve)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    whole = Parser(prog="jax-dora", description="DoRA for Llama, Mistral and Qwen, on JAX.")
    commands = whole.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        told = (module.__doc__ or "").partition("\n\n")
        one = commands.add_parser(
            name,
            help=told[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_flags(one)
        one.set_defaults(run=module.run)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      The exit status: 0; 1 for a run that diverged, a model that computes NaN, a full disk, or too
      little memory; 2 for bad flags, data or folders; 130 for Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Letters that a terminal's encoding has not are printed by their numbers.
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(stderr=True)
    try:
        args = parser().parse_args(argv)
        return args.run(args)
    except (Exception, KeyboardInterrupt) as error:
        status, told = _explain(error)
        notes = " ".join(getattr(error, "__notes__", ()))
        line = " ".join(f"{told}{'. ' if notes else ''}{notes}".split())
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        return status


def _explain(error: BaseException) -> tuple[int, str]:
    """Returns the exit status and what to say; raises errors that only a bug explains."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED, "Interrupted"
        case UsageError():
            return USAGE, f"Error: {error}"
        case DivergedError() | FirstStoppedError() | NotFiniteError():
            return FAILED, f"Stopped: {error}"
        case MemoryError():
            return FAILED, f"Out of memory: {error or 'the host has too little'}"
        case jax.errors.JaxRuntimeError() if "RESOURCE_EXHAUSTED" in str(error):
            first = str(error).partition("\n")[0]
            return FAILED, f"Out of memory on the device: {first}"
        case OSError():
            full = "The disk is full" if error.errno in FULL else "A file could not be written"
            return FAILED, f"{full}: {error}"
    raise error
