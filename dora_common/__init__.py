"""Code that `jax_dora` and `torch_dora` share: PEFT files, rules, merge reports, hyperparameters.

Nothing here imports JAX or PyTorch.
"""
