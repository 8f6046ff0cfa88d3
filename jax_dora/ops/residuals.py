"""What a custom gradient keeps of its forward pass, as a tree of one structure.

What is kept depends on what is differentiated. A jitted function is traced once and may be
differentiated at two places with respect to different arguments; JAX then unpacks the residuals of
both by the structure that the latter had. So None is kept as an empty array.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def pack(tree: Any) -> Any:
    """`tree`, of arrays that are not bool, with an array in the place of every None."""
    return jax.tree.map(
        lambda leaf: lax.full((0,), False) if leaf is None else leaf, tree, is_leaf=_is_none
    )


def unpack(packed: Any) -> Any:
    """What was packed."""
    return jax.tree.map(lambda leaf: None if leaf.dtype == jnp.bool_ else leaf, packed)


def _is_none(leaf: Any) -> bool:
    return leaf is None
