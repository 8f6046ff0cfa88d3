"""The command `jax-dora`: fine-tunes a Llama, Mistral or Qwen, and what goes with it."""

from jax_dora.commands.main import main as main
from jax_dora.commands.main import parser as parser
