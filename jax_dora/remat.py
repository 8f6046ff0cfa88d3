"""Rematerialisation that does not compute the norm twice."""

from collections.abc import Callable

import jax

from jax_dora.ops.linear import NORM_NAME


def remat_policy(*names: str) -> Callable[..., bool]:
    """A policy for `jax.checkpoint`, `nnx.remat` and `nn.remat` that keeps every layer's norm.

    The norm is f32[out] and depends on no activation, so that keeping it costs next to nothing and
    saves the backward pass one reading of every kernel.

    The last projection of a rematerialised block is worth a thought. Nothing in the block reads its
    result, so a plain or a LoRA layer is not computed again there; a DoRA layer is, for the sake of
    its magnitude's gradient alone, which reads inner = x (kernel + s·lora_a lora_b). To keep inner
    instead, as large as the layer's result, give it a name and keep that:

        block.down_proj.inner_name = "down_inner"    # or DoRARule(..., inner_name="down_inner")
        nnx.remat(block, policy=jax_dora.remat_policy("down_inner"))

    Where memory is for less, ("down_inner", 0.5) keeps it of half of the tokens, and leaves the
    other half to be computed again. (Not with dropout mode "input", in which there is no such
    array. The name goes with the adapter: `jax_dora.set_adapter` and PEFT folders bring layers that
    have none.)

    Args:
      *names: further names given by `jax.ad_checkpoint.checkpoint_name`, to be kept too.
    """
    return jax.checkpoint_policies.save_only_these_names(NORM_NAME, *names)
