"""Fine-tunes a Llama, Mistral or Qwen with DoRA: `python -m jax_dora.finetune --help`."""
