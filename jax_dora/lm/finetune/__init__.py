"""Fine-tunes a Llama, Mistral or Qwen model with DoRA. See `jax-dora finetune --help`."""
