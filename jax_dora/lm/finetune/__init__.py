"""Fine-tunes a Llama, Mistral or Qwen model with DoRA; used by `jax-dora finetune`."""

from jax_dora.lm.finetune.results import Result as Result
from jax_dora.lm.finetune.run import run as run
from jax_dora.lm.finetune.settings import Settings as Settings
