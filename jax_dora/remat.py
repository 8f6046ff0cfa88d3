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
      *names: further names given by `jax.ad_checkpoint.checkpoint_name`, to be kept too. A name
        alone: the share goes into `inner_name`.

    Raises:
      TypeError: a name is no string.
      ValueError: a name is empty.
    """
    for name in names:
        if isinstance(name, tuple):
            raise TypeError(
                f"remat_policy is given {name!r}; expected the name alone, as a string: the share "
                "of the tokens goes into the layer's inner_name"
            )
        if not isinstance(name, str):
            raise TypeError(f"remat_policy is given {name!r}; expected names, as strings")
        if not name:
            raise ValueError(
                "remat_policy is given ''; expected names that jax.ad_checkpoint.checkpoint_name "
                "has given: leave it out to keep the norms alone"
            )
    return jax.checkpoint_policies.save_only_these_names(NORM_NAME, *names)
