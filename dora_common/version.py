"""The version that is installed; apart, since looking it up imports much."""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("jax-dora")
except _metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"
