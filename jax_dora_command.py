"""Starts the installed command `jax-dora`.

This module imports little, so that Ctrl-C during the import of JAX, or a missing package, ends the
command with one line instead of a traceback. Therefore it is not in `jax_dora`, whose import takes
long.
"""

import importlib
import os
import signal
import sys
from typing import NoReturn

# The escape sequence shows the cursor again, which a progress bar hides.
_INTERRUPTED = b"\x1b[?25h\nInterrupted.\n" if os.isatty(2) else b"\nInterrupted.\n"

# Packages that every command imports, but that a plain `pip install jax-dora` does not install.
_EXTRA_PACKAGES = ("rich", "tokenizers")


def _exit_on_interrupt(*_: object) -> NoReturn:
    # No cleanup is needed: files are written so that even a kill leaves no partial file.
    os.write(2, _INTERRUPTED)
    os._exit(130)


def main() -> NoReturn:
    """Runs the command, and exits with its status."""
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
