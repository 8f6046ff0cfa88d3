"""Fine-tunes a Llama, Mistral or Qwen with DoRA: the same as `python -m jax_dora.finetune`."""

import sys

from jax_dora.finetune.command import main

sys.exit(main())
