"""Holds what `jax_dora` and `torch_dora` say alike, and no framework owns.

PEFT's files, rules, merge reports and hyperparameters; nothing here imports JAX or PyTorch.
"""
