"""The installed version. It has a module of its own since the lookup imports many modules."""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("jax-dora")
except _metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"
