"""Rematerialisation that does not compute the norm twice."""

from collections.abc import Callable

import jax

from jax_dora.ops.linear import NORM_NAME


def remat_policy(*names: str) -> Callable[..., bool]:
    """A policy for `jax.checkpoint`, `nnx.remat` and `nn.remat` that keeps every layer's norm.

    The norm is f32[out] and depends on no activation, so that keeping it costs next to nothing and
    saves the backward pass one reading of every kernel.

    Args:
      *names: further names given by `jax.ad_checkpoint.checkpoint_name`, to be kept too.
    """
    return jax.checkpoint_policies.save_only_these_names(NORM_NAME, *names)
