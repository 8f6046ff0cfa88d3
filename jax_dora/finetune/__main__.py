"""Runs `python -m jax_dora.finetune`."""

import sys

from jax_dora.finetune.command import main

sys.exit(main())
