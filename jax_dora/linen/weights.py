"""Adapted parameters of a linen model outside layers with a DoRA class.

While the model runs, a JAX trace propagates each of them from the model's variables through casts,
transposes, scans and so on to the operations that read it; see `jax_dora.tracing`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax import nnx, traverse_util

from dora_common.hyperparameters import ADAPTER_NAMES
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.adapt.weight_adapter import WeightAdapter
from jax_dora.linen.layer import boxed_like
from jax_dora.linen.param_inventory import adapter_paths, params_path_of
from jax_dora.tracing.trace import WeightTrace

Params = dict[tuple[str, ...], Any]
"""The leaves of a collection, by their paths."""


def weight_path(weight: AdaptableWeight) -> tuple[str, ...]:
    """Returns the weight's path in params."""
    return params_path_of(weight, weight.param)


def adapter_of(
    weight: AdaptableWeight, params: Mapping[tuple[str, ...], Any], rngs: nnx.Rngs | None = None
) -> WeightAdapter:
    """Returns the adapter with its arrays in `params`; without dropout if `rngs` is None."""
    arrays = {name: nn.unbox(params[path]) for name, path in adapter_paths(weight).items()}
    return _adapter(weight, params, rngs, arrays)


def create_params(
    weight: AdaptableWeight, params: Mapping[tuple[str, ...], Any], key: jax.Array
) -> Params:
    """Returns the parameters of a fresh adapter, in the same kind of boxes as the weight; only its
    magnitude if `params` has the others."""
    paths = adapter_paths(weight)
    arrays = {name: nn.unbox(params[path]) for name, path in paths.items() if path in params}
    has_others = arrays.keys() == {"lora_a", "lora_b"}
    adapter = _adapter(weight, params, nnx.Rngs(key), arrays if has_others else None)
    boxed = boxed_like(params[weight_path(weight)], adapter)
    names = ["magnitude"] if has_others else ADAPTER_NAMES
    return {paths[name]: boxed[name] for name in names}


def _adapter(
    weight: AdaptableWeight,
    params: Mapping[tuple[str, ...], Any],
    rngs: nnx.Rngs | None,
    arrays: Any = None,
) -> WeightAdapter:
    rule = weight.rule
    assert rule is not None
    adapter = WeightAdapter(_Holder(), weight)
    parameter = nnx.Param(nn.unbox(params[weight_path(weight)]))
    setattr(adapter.module, weight.param, parameter)
    adapter.create_arrays(rule, rngs, arrays)
    return adapter


class _Holder(nnx.Module):
    """Holds a weight and its adapter during a call."""


def weights_without_adapter(
    weights: Sequence[AdaptableWeight], params: Mapping[tuple[str, ...], Any]
) -> list[AdaptableWeight]:
    """Returns the weights that are missing in `params`, or whose adapter is."""
    return [
        one
        for one in weights
        if not params.keys() >= {weight_path(one), *adapter_paths(one).values()}
    ]


def trace_adapted_params(
    weights: Sequence[AdaptableWeight],
    trace: WeightTrace,
    key: jax.Array | None,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the variables without adapters, with a tracer of `trace` in place of each adapted
    weight; `key` draws the dropout masks, None turns dropout off."""
    params = traverse_util.flatten_dict(variables["params"])
    traced = dict(params)
    for number, weight in enumerate(weights):
        rngs = None
        if key is not None and weight.rule and weight.rule.dropout:
            rngs = nnx.Rngs(dropout=jax.random.fold_in(key, number))
        path, adapter = weight_path(weight), adapter_of(weight, params, rngs)
        value = adapter.traced(trace, nn.unbox(params[path]))
        traced[path] = nn.meta.replace_boxed(params[path], value)
        for path in adapter_paths(weight).values():
            del traced[path]
    return {**variables, "params": traverse_util.unflatten_dict(traced)}
