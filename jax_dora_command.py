"""Starts the installed command `jax-dora`.

This module imports little, so that Ctrl-C during the import of JAX, or a missing package, ends the
command with one line instead of a traceback. Therefore it is not in `jax_dora`, whose import takes
long.
"""

import argparse
import ast
import importlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

COMMANDS = ("finetune", "generate", "merge", "inspect", "serve")

# The escape sequence shows the cursor again, which a progress bar hides.
_INTERRUPTED = b"\x1b[?25h\nInterrupted.\n" if os.isatty(2) else b"\nInterrupted.\n"

# Packages that every command imports, but that a plain `pip install jax-dora` does not install.
_EXTRA_PACKAGES = ("rich", "tokenizers")


def _exit_on_interrupt(*_: object) -> NoReturn:
    # No cleanup is needed: files are written so that even a kill leaves no partial file.
    os.write(2, _INTERRUPTED)
    os._exit(130)


def overview() -> str:
    """Returns the help of all commands, from their sources, since importing them takes seconds."""
    parser = argparse.ArgumentParser(
        prog="jax-dora", description="DoRA for Llama, Mistral and Qwen models on JAX."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    package = importlib.util.find_spec("jax_dora")
    assert package is not None
    assert package.origin is not None
    for name in COMMANDS:
        file = Path(package.origin).parent / "lm" / "commands" / f"{name}.py"
        description = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
        commands.add_parser(name, help=description.partition("\n")[0])
    return parser.format_help()


def main() -> NoReturn:
    """Runs the command, and exits with its status."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(overview(), end="")
        sys.exit()
    signal.signal(signal.SIGINT, _exit_on_interrupt)
    try:
        commands = importlib.import_module("jax_dora.lm.commands")
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA_PACKAGES:
            raise
        sys.exit(
            f"jax-dora needs {error.name}; install it with pip install 'jax-dora[finetune]', or "
            "pip install 'jax-dora[serve]' for jax-dora serve"
        )
    sys.exit(commands.main())
