"""Language models with DoRA: the decoder, fine-tuning, the server, and the command `jax-dora`."""
