"""`coverage`: a table of a linen model's weights: what is adapted and what can be adapted."""

from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util

from jax_dora.adapt.bridge import is_adapter
from jax_dora.adapt.coverage import Coverage, table
from jax_dora.linen.inventory import adapter_paths, find_linen_weights
from jax_dora.linen.module import DoRA
from jax_dora.tracing.read_log import Example, split_arrays


def coverage(model: nn.Module, *example: Any, **kwargs: Any) -> Coverage:
    """Returns every weight of two axes or more of `model`, and whether and how it can be adapted.

        print(jax_dora.linen.coverage(model, tokens))

    Args:
      model: an unbound module, or the result of `apply_dora`.
      *example, **kwargs: see `jax_dora.coverage`; a function gets the bound model.

    Raises:
      TypeError: `model` is not a linen module.
      Exception: any error of the model's call.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a linen nn.Module: for nnx there is "
            "jax_dora.coverage"
        )
    inputs = Example.of_arguments(*example, **kwargs)
    plain = model.model if isinstance(model, DoRA) else model
    weights, _ = find_linen_weights(plain, inputs)
    if isinstance(model, DoRA):
        arrays, rebuild = split_arrays(inputs)
        variables = jax.eval_shape(lambda arrays: _init(model, rebuild(arrays)), arrays)
        params = traverse_util.flatten_dict(variables["params"])
        lora_a = {one: adapter_paths(one)["lora_a"] for one in weights}
        weights = [
            one.replace(is_adapted=one.is_matched and is_adapter(lora_a[one], params))
            for one in weights
        ]
    return table(weights)


def _init(model: nn.Module, example: Example) -> Any:
    rngs = {"params": jax.random.key(0)}
    return model.init(rngs, *example.args, method=example.function, **example.kwargs)
