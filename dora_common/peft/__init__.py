"""Hugging Face PEFT adapter folders: configuration, tensor keys, and matching them to a model.

This package imports neither JAX nor PyTorch; `jax_dora.peft` and `torch_dora.peft` build on it.
"""
