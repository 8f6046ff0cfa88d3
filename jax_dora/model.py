"""The check of what every function that takes a whole nnx model is given."""

from typing import Any

from flax import linen, nnx


def check_model(model: Any, *, for_linen: str | None = None) -> None:
    """Raises TypeError unless `model` is an nnx module.

    Args:
      for_linen: what does the same for a linen model, by its full name; None where nothing does.
    """
    if isinstance(model, nnx.Module):
        return
    message = f"model is a {type(model).__name__}; expected an nnx.Module"
    if for_linen is not None:
        message += f": for Flax linen there is {for_linen}"
    elif isinstance(model, linen.Module):
        message += (
            ": this has no counterpart for Flax linen, for which there are apply_dora, merge_dora, "
            "split_adapters and join_adapters in jax_dora.linen; write the model in nnx for it"
        )
    raise TypeError(message)
