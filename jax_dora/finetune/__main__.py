"""Runs `jax-dora finetune` as `python -m jax_dora.finetune`."""

import sys

from jax_dora.commands import main

sys.exit(main(["finetune", *sys.argv[1:]]))
