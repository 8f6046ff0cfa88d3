"""The backward direction of `dropout_shrink`, dA = drop(x)ᵀ dz, with its own `wins`."""

import jax

from jax_dora.ops.mosaic.projection.dropout_shrink import Config
from jax_dora.ops.mosaic.projection.dropout_shrink import config as config
from jax_dora.ops.mosaic.projection.dropout_shrink import launch as launch
from jax_dora.ops.mosaic.projection.dropout_shrink import refuses as refuses

__all__ = ["Config", "config", "launch", "refuses", "wins"]


def wins(rows: int, in_features: int, rank: int, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel was no slower than XLA (H200, 1713ac4, `benchmarks ops`)."""
    return rows >= 2049 and in_features >= 4096 and rank <= 543
