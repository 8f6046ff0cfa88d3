"""`reset_magnitudes`: sets the magnitudes of a linen model to its current norms."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util
from flax.errors import ModifyScopeVariableError

from jax_dora.adapt.bridge import is_adapter
from jax_dora.linen.module import DoRA


def reset_magnitudes(
    adapted: nn.Module, variables: Mapping[str, Any], *args: Any, method: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Returns `variables` with every magnitude set to the current norm of its layer, so that g = 1.

    Call this after other weights were put into the parameters of an adapted model. The magnitudes
    of a fresh adapter are the norms of the weights of that moment; with them, even an adapter whose
    lora_b is zero would scale the new weights. `variables` stays unchanged.

        variables = reset_magnitudes(adapted, {"params": {**params, **pretrained}}, x)

    Args:
      adapted: the result of `apply_dora`, or a model that contains `DoRADense`.
      variables: the variables of `adapted`: "params", and its other collections if there are any.
      *args, **kwargs: any inputs of the model, which is called with them to find its layers.
      method: the method of the model that takes these inputs; None is `__call__`.

    Raises:
      ValueError: `variables` has no magnitude, or the call does not reach the layer of each.
      Exception: any error of calling the model.
    """
    flat = traverse_util.flatten_dict(variables.get("params", {}))
    magnitudes = {path for path in flat if path[-1].endswith("magnitude")}
    magnitudes = {path for path in magnitudes if is_adapter(path, flat)}
    if not magnitudes:
        raise ValueError(
            "variables has no magnitude in params; expected the variables of a model with "
            'adapters: create them by init, or by apply with mutable=["params"]'
        )
    params = {path: leaf for path, leaf in flat.items() if path not in magnitudes}
    quiet = adapted.clone(deterministic=True) if isinstance(adapted, DoRA) else adapted
    others = {**variables, "params": traverse_util.unflatten_dict(params)}
    rngs = {"params": jax.random.key(0)}  # Nothing is drawn: only norms are missing.

    def call(mutable: list[str]) -> Any:
        options: Any = {"rngs": rngs, "mutable": mutable, "method": method}
        _, made = quiet.apply(others, *args, **options, **kwargs)
        return traverse_util.flatten_dict(made["params"])

    try:
        found = call(["params"])
    except ModifyScopeVariableError:
        # The call updates other collections too, such as BatchNorm's statistics, which are dropped.
        found = call([*others])
    if missed := sorted("/".join(path) for path in magnitudes - found.keys()):
        raise ValueError(
            f"this call of the model does not reach {missed}; expected method= and inputs that "
            "reach every adapted layer"
        )
    new = {path: found[path] if path in magnitudes else leaf for path, leaf in flat.items()}
    return {**variables, "params": traverse_util.unflatten_dict(new)}
