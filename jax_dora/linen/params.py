"""Finds adapters in a linen model's params, splits them from the base parameters, and joins the
two."""

from collections.abc import Mapping
from typing import Any

from flax import traverse_util

from jax_dora.adapt.bridge import is_adapter

Params = Mapping[str, Any]


def adapted_modules(params: Params) -> list[str]:
    """Returns the path of every module that has an adapter in `params`."""
    paths = traverse_util.flatten_dict(params)
    lora_a = (path for path in paths if path[-1].endswith("lora_a") and is_adapter(path, paths))
    return list(dict.fromkeys("/".join(path[:-1]) for path in lora_a))


def params_path(path: tuple[str, ...]) -> tuple[str, str]:
    """Returns the path of a leaf's module, and the leaf's name in it."""
    return "/".join(path[:-1]), path[-1]


def adapter_labels(params: Params) -> Any:
    """Labels every leaf of `params` "adapter" or "frozen", for `optax.multi_transform`:

    optax.multi_transform(
        {"adapter": optax.adamw(1e-4), "frozen": optax.set_to_zero()}, adapter_labels
    )
    """
    paths = traverse_util.flatten_dict(params).keys()
    return traverse_util.path_aware_map(
        lambda path, _: "adapter" if is_adapter(path, paths) else "frozen", params
    )


def split_adapters(params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (adapters, base): two trees that `join_adapters` joins again.

    Differentiate with respect to the first tree alone; then no gradient of a kernel is computed.
    """
    flat = traverse_util.flatten_dict(params)
    adapters = {path: leaf for path, leaf in flat.items() if is_adapter(path, flat)}
    base = {path: leaf for path, leaf in flat.items() if path not in adapters}
    return traverse_util.unflatten_dict(adapters), traverse_util.unflatten_dict(base)


def join_adapters(adapters: Params, base: Params) -> dict[str, Any]:
    """Returns the tree that `split_adapters` has split.

    Raises:
      ValueError: a leaf is in both trees.
    """
    flat_adapters = traverse_util.flatten_dict(adapters)
    flat_base = traverse_util.flatten_dict(base)
    if both := flat_adapters.keys() & flat_base.keys():
        paths = ", ".join("/".join(path) for path in sorted(both))
        raise ValueError(
            f"adapters and base both hold {paths}; expected the two results of split_adapters"
        )
    return traverse_util.unflatten_dict(flat_base | flat_adapters)
