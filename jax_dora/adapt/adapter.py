"""Adapters as values: `get_adapter` reads one from a model, `set_adapter` puts one into a model.

A layer holds one adapter at a time. Several DoRA adapters have no agreed meaning together: each has
its own norm and magnitude, so they do not simply add up. There are two ways to combine them.
`merge_dora` with `adapters=` merges them in turn as PEFT does, each with the norm of the base
weight. `merge_dora` followed by `apply_dora` or `set_adapter` puts one adapter on top of another.
"""

import dataclasses
import logging
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.peft.replaced_parameters import described, replaced_parameters, warn_of
from dora_common.rules import listing
from jax_dora.adapt import base_values
from jax_dora.adapt.adapted_class import adapter_of
from jax_dora.adapt.apply import adapt_weight
from jax_dora.adapt.inventory import find_weights
from jax_dora.adapt.reads import record_reads
from jax_dora.adapt.tree import (
    Modules,
    by_path,
    check_model,
    close_linen_modules,
    find_dora_layers,
    find_modules,
    replace_modules,
    without_adapters,
)
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers.base_layer import check_has_values, on_devices_of
from jax_dora.layers.rule import DoRARule
from jax_dora.tracing.read_log import Example

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter of a whole model, without the model: a pytree whose leaves are the adapter's
    arrays.

    Attributes:
      rules: one rule for each layer; its path matches that layer alone.
      arrays: by the layer's path, then by "lora_a", "lora_b" and "magnitude", in the layer's
        shapes. The order of the keys has no meaning, since JAX sorts the keys of a dict in every
        pytree operation.
      weights: the adapted weights. A layer may be missing: then its path and its class tell what is
        adapted, and a stack of layers is one along leading axes.
    """

    rules: tuple[DoRARule, ...]
    arrays: dict[str, dict[str, Any]]
    weights: tuple[AdaptableWeight, ...] = ()


jax.tree_util.register_dataclass(Adapter, data_fields=["arrays"], meta_fields=["rules", "weights"])


def get_adapter(model: nnx.Module) -> Adapter:
    """Returns the adapter of `model`, with the current arrays of its parameters.

    Parameters of the base model are not in it. A warning lists those that a PEFT folder has
    replaced, or that have changed since `model` got its adapter, as by training with
    `wrt=nnx.Param`.

    Raises:
      TypeError: `model` is not an nnx module.
      ValueError: `model` has no adapter.
    """
    check_model(model, for_linen="jax_dora.linen.split_adapters")
    modules = find_modules(model)
    layers = {paths[0]: layer for paths, layer in find_dora_layers(modules).items()}
    if not layers:
        raise ValueError("model holds no adapter; expected a model from apply_dora")
    if replaced := replaced_parameters(model):
        _LOG.warning(
            "get_adapter leaves out these parameters of the base model, which a PEFT folder has "
            "replaced; save_adapter stores them if modules_to_save, bias or "
            "trainable_token_indices name them:%s",
            described(replaced),
        )
    base_values.warn_of_changed(model, "get_adapter")
    return Adapter(
        tuple(layer.rule(re.escape(path)) for path, layer in layers.items()),
        {
            path: {name: getattr(layer, name).get_value() for name in ADAPTER_NAMES}
            for path, layer in layers.items()
        },
        adapted_weights(modules),
    )


def check_adapter(name: str, value: Any) -> None:
    """Raises TypeError unless the argument `name` is an `Adapter`."""
    if not isinstance(value, Adapter):
        message = f"{name} is a {type(value).__name__}; expected an Adapter from get_adapter"
        if isinstance(value, str | os.PathLike):
            message += ": jax_dora.peft.load_adapter reads a folder"
        raise TypeError(message)


def adapted_weights(model: nnx.Module | Modules) -> tuple[AdaptableWeight, ...]:
    """Returns the adapted weights of a model, or of its `find_modules`, without the model."""
    found = (one for one in find_weights(model) if one.is_adapted)
    return tuple(one.replace(modules={}) for one in found if adapter_of(one) is not None)


def weights_in_code(model: nnx.Module, example: Any) -> tuple[AdaptableWeight, ...]:
    """Returns the weights of `model`, a model without adapters, that are not in a layer with a DoRA
    class and that can be adapted, as a call with `example` shows. They come without the model."""
    found = find_weights(model, record_reads(model, Example.of(example)))
    return tuple(
        one.replace(modules={})
        for one in found
        if one.reader is not None and not one.is_layer and not one.refusal
    )


def set_adapter[Model: nnx.Module](
    model: Model, adapter: Adapter | None, *, rngs: nnx.Rngs | None = None
) -> Model:
    """Returns a copy of `model` with `adapter` in place of its own adapter; None removes the
    adapter. Parameters of the base model that a PEFT folder has replaced stay; a warning lists
    them.

        adapters = {"french": get_adapter(french), "code": get_adapter(code)}
        model = set_adapter(model, adapters["code"])

    The copy shares the arrays of `model` and of `adapter`, but NumPy arrays are copied. If the
    weights are sharded, or committed to a device, and the adapter is on other devices, its arrays
    are copied to the devices of the weights, and sharded like them. Magnitudes in bf16 or fp16 are
    cast to float32, as in `load_adapter`. A function compiled by `nnx.jit` does not compile again
    for an adapter with the same layers, ranks and scales.

    The dropout of each new layer is on or off like the dropout of the layer that it replaces. If
    that layer has no dropout, the new dropout is on if any module in `model` is in training (its
    `deterministic` is False), and off otherwise. `train()` and `eval()` of the copy switch it.

    Args:
      rngs: for the dropout masks; only an adapter with dropout needs it.

    Raises:
      TypeError: `model` is not an nnx module, or `adapter` is not an `Adapter`.
      ValueError: the adapter has a layer that the model lacks or that has another shape there; or
        it has dropout and `rngs` is None; or its rules and its arrays belong to different layers;
        or `model` is abstract, outside `nnx.eval_shape`. `model` stays unchanged.
    """
    check_model(model, for_linen="jax_dora.linen.join_adapters")
    base, modules = without_adapters(model)
    if adapter is None:
        return close_linen_modules(base)
    check_has_values(base, "jax_dora.set_adapter")
    check_adapter("adapter", adapter)
    warn_of(replaced_parameters(base), "after set_adapter, ")
    rules = rules_by_path(adapter)
    found = find_weights(modules)
    layers = {path: one for one in found if one.is_layer for path in one.module_paths}
    weights: dict[str, AdaptableWeight | None] = {**layers}
    for known in adapter.weights:
        if not known.is_layer:
            weights[known.path] = known.in_model(by_path(modules))
        elif known.path in layers:
            weights[known.path] = layers[known.path].replace(axes=known.axes)
    replacements: dict[int, Any] = {}
    for path, arrays in adapter.arrays.items():
        rule, weight = rules[path], weights.get(path)
        if weight is None:
            raise ValueError(
                f"adapter has a layer {path!r}; the model's layers that can be adapted are:"
                f"{listing(layers)}"
            )
        if rule.dropout and rngs is None:
            raise ValueError(
                f"rngs is None and the adapter has dropout for {path!r}; expected nnx.Rngs with a "
                "dropout stream"
            )
        layer = adapt_weight(weight.replace(rule=rule), rngs or nnx.Rngs(0))
        for name, value in arrays.items():
            parameter = getattr(layer, name)
            if parameter.shape != value.shape:
                raise ValueError(
                    f"adapter has {name} {value.shape} for {path!r}; expected {parameter.shape}, "
                    "as this model's layer needs"
                )
            if isinstance(value, np.ndarray):
                value = jnp.array(value)  # A copy: a model is updated in place.
            if name == "magnitude" and value.dtype.itemsize < parameter.dtype.itemsize:
                value = value.astype(parameter.dtype)
            parameter.set_value(on_devices_of(parameter.get_value(), value))
        if weight.is_layer:
            replacements[id(weight.module)] = layer
    adapted = replace_modules(base, replacements)
    if not find_dora_layers(model):
        base_values.remember(adapted)
    return _copy_training_mode(model, adapted)


def rules_by_path(adapter: Adapter) -> dict[str, DoRARule]:
    """Returns the rule of each layer of `adapter` by the layer's path. Raises ValueError if rules
    and arrays belong to different layers, or an array is missing or unknown."""
    rules = {rule.path: rule for rule in adapter.rules}
    patterns = {path: re.escape(path) for path in adapter.arrays}
    if unmatched := rules.keys() ^ set(patterns.values()):
        raise ValueError(
            "adapter has rules and arrays of different layers; expected a rule for each layer that "
            "has arrays, as get_adapter returns them. The layers with only one of the two are:"
            f"{listing(unmatched)}"
        )
    for path, arrays in adapter.arrays.items():
        if arrays.keys() != set(ADAPTER_NAMES):
            raise ValueError(
                f"adapter has {sorted(arrays)} for {path!r}; expected {sorted(ADAPTER_NAMES)}, as "
                "get_adapter returns them"
            )
    return {path: rules[pattern] for path, pattern in patterns.items()}


def _copy_training_mode[Model: nnx.Module](other: nnx.Module, model: Model) -> Model:
    """Sets the modules of `model`, in place, to training or evaluation like those of `other`.
    Dropout that `other` does not have is on if any module of `other` is in training."""
    others = by_path(find_modules(other))
    is_training = any(getattr(module, "deterministic", None) is False for module in others.values())
    for paths, module in find_modules(model).items():
        source: Any = others.get(paths[0])
        for name in ("deterministic", "use_running_average"):
            if hasattr(source, name) and hasattr(module, name):
                setattr(module, name, getattr(source, name))
        if source is None and isinstance(module, nnx.Dropout):
            module.deterministic = not is_training
    return model
