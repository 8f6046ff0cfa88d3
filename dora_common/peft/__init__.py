"""Hugging Face PEFT adapter folders as files: their configuration, their keys, what fits what.

Imports neither JAX nor PyTorch; `jax_dora.peft` and `torch_dora.peft` stand on it.
"""
