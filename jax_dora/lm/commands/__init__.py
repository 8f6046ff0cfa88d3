"""The command `jax-dora`, with its subcommands finetune, generate, merge, inspect and serve."""

from jax_dora.lm.commands.main import main as main
from jax_dora.lm.commands.main import parser as parser
