"""Adapters in a linen model's params: told apart, taken out and put back."""

from collections.abc import Mapping
from typing import Any

from flax import traverse_util

from dora_common.hyperparameters import ADAPTER_NAMES

Params = Mapping[str, Any]


def adapter_labels(params: Params) -> Any:
    """Labels every leaf of `params` "adapter" or "frozen", for `optax.multi_transform`:

    optax.multi_transform(
        {"adapter": optax.adamw(1e-4), "frozen": optax.set_to_zero()}, adapter_labels
    )
    """
    return traverse_util.path_aware_map(
        lambda path, _: "adapter" if path[-1] in ADAPTER_NAMES else "frozen", params
    )


def split_adapters(params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (adapters, base): two trees that `join_adapters` makes one again.

    Differentiate with respect to the first alone, and no gradient of a kernel is computed.
    """
    flat = traverse_util.flatten_dict(params)
    adapters = {path: leaf for path, leaf in flat.items() if path[-1] in ADAPTER_NAMES}
    base = {path: leaf for path, leaf in flat.items() if path[-1] not in ADAPTER_NAMES}
    return traverse_util.unflatten_dict(adapters), traverse_util.unflatten_dict(base)


def join_adapters(adapters: Params, base: Params) -> dict[str, Any]:
    """Returns the tree that `split_adapters` split.

    Raises:
      ValueError: a leaf is in both.
    """
    flat_adapters = traverse_util.flatten_dict(adapters)
    flat_base = traverse_util.flatten_dict(base)
    if both := flat_adapters.keys() & flat_base.keys():
        paths = ", ".join("/".join(path) for path in sorted(both))
        raise ValueError(
            f"adapters and base both hold {paths}; expected the two results of split_adapters"
        )
    return traverse_util.unflatten_dict(flat_base | flat_adapters)
