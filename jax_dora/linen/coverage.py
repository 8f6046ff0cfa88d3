"""The table of a linen model's weights: which are adapted, and which can be."""

from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util

from jax_dora.adapt.coverage import Coverage, table
from jax_dora.linen.find_sites import find_linen_sites, lora_a_path
from jax_dora.linen.module import DoRA
from jax_dora.weights.read_log import Example, split_arrays


def coverage(model: nn.Module, *example: Any, **kwargs: Any) -> Coverage:
    """Returns every weight of two axes or more of `model`, and whether and how it can be adapted.

        print(jax_dora.linen.coverage(model, tokens))

    Args:
      model: an unbound module, or what `apply_dora` has made of one.
      *example, **kwargs: as `jax_dora.coverage`'s; a function takes the bound model.

    Raises:
      TypeError: `model` is no linen module.
      Exception: whatever the call of the model raises.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a linen nn.Module: for nnx there is "
            "jax_dora.coverage"
        )
    given = Example.of_arguments(*example, **kwargs)
    plain = model.model if isinstance(model, DoRA) else model
    found = find_linen_sites(plain, given)
    if isinstance(model, DoRA):
        arrays, rebuild = split_arrays(given)
        made = jax.eval_shape(lambda arrays: _init(model, rebuild(arrays)), arrays)
        params = traverse_util.flatten_dict(made["params"])
        for site in found:
            site.is_adapted = site.is_matched and lora_a_path(site) in params
    return table(found)


def _init(model: nn.Module, example: Example) -> Any:
    rngs = {"params": jax.random.key(0)}
    return model.init(rngs, *example.args, method=example.function, **example.kwargs)
