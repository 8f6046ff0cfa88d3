"""The installed command, which ends in one line also where Ctrl-C comes before JAX is imported, and
where a package that it needs is not installed."""

import importlib
import os
import signal
import sys
from typing import NoReturn

# Shows the cursor, which a progress bar hides.
_TOLD = b"\x1b[?25h\nInterrupted.\n" if os.isatty(2) else b"\nInterrupted.\n"

# What every command imports, and a plain pip install jax-dora leaves out.
_OF_EXTRAS = ("rich", "tokenizers")


def _stop(*_: object) -> NoReturn:
    # Nothing is cleaned up, as under a kill, for which every file has to be written anyway.
    os.write(2, _TOLD)
    os._exit(130)


def jax_dora() -> NoReturn:
    signal.signal(signal.SIGINT, _stop)
    try:
        commands = importlib.import_module("jax_dora.commands")
    except ModuleNotFoundError as error:
        if error.name not in _OF_EXTRAS:
            raise
        sys.exit(
            f"jax-dora needs {error.name}; install it by pip install 'jax-dora[finetune]', or "
            "'jax-dora[serve]' for jax-dora serve"
        )
    sys.exit(commands.main())
