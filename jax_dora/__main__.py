"""Runs `python -m jax_dora`, the same as the command `jax-dora`."""

import sys

from jax_dora.lm.commands import main

sys.exit(main())
