"""Runs `jax-dora finetune` as `python -m jax_dora.lm.finetune`."""

import sys

from jax_dora.lm.commands import main

sys.exit(main(["finetune", *sys.argv[1:]]))
