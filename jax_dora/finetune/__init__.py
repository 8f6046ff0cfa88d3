"""Fine-tunes a Llama, Mistral or Qwen with DoRA: `jax-dora finetune --help`."""
