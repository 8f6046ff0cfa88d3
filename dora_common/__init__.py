"""Holds what `jax_dora` and `torch_dora` say alike, and no framework owns.

PEFT's files, rules, merge reports and hyperparameters; nothing here imports JAX or PyTorch.
"""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("jax-dora")
except _metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"
