"""Fine-tunes a Llama, Mistral or Qwen model with DoRA, like `jax-dora finetune`."""

import sys

from jax_dora.lm.commands import main

sys.exit(main(["finetune", *sys.argv[1:]]))
