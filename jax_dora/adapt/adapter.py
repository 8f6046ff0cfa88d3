"""Adapters as values: taken out of a model, and put into one.

A layer holds one adapter at a time. DoRA has no agreed meaning for several at once, since each
brings a norm and a magnitude of its own, so that they do not simply add up: `merge_dora` with
`adapters=` merges them in turn as PEFT does, each with its norm over the base alone, and
`merge_dora` followed by `apply_dora` or `set_adapter` puts one on top of another.
"""

import dataclasses
import re
from typing import Any

import jax
from flax import nnx

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import listing
from jax_dora.adapt.apply import adapt_site
from jax_dora.adapt.find_sites import find_sites
from jax_dora.adapt.site import Site
from jax_dora.adapt.trace_reads import trace_reads
from jax_dora.adapt.tree import (
    Found,
    check_model,
    find_dora_layers,
    find_modules,
    remove_dora,
    replace_modules,
)
from jax_dora.layers import DoRALayer
from jax_dora.layers.rule import DoRARule
from jax_dora.weights.module import adapters_of, at_path, has_dora_type
from jax_dora.weights.read_log import Example


@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """Says where an adapter lies that stands beside a weight, in a module which keeps its class.

    Attributes:
      path: of the weight.
      module: the path of the module that owns it.
      param, axes: as `jax_dora.register`'s.
      reader: the path of the module whose methods read it.
      inside: the path from there to the owner.
      is_lookup: whether it is an embedding.
    """

    path: str
    module: str
    param: str
    axes: str
    reader: str
    inside: tuple[str, ...]
    is_lookup: bool = False


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One adapter of a whole model, without the model: a pytree whose leaves are its arrays.

    Attributes:
      rules: one for each layer, whose path it matches exactly.
      arrays: by the layer's path, then "lora_a", "lora_b", "magnitude", in the layer's shapes. In
        any order: JAX sorts the keys of a dict wherever it maps over a pytree.
      weights: of those that are no layers of their own.
      stack_axes: the paths of layers that are stacked, and the first axis of the kernel's that
        they are stacked along.
    """

    rules: tuple[DoRARule, ...]
    arrays: dict[str, dict[str, Any]]
    weights: tuple[AdaptedWeight, ...] = ()
    stack_axes: tuple[tuple[str, int], ...] = ()


jax.tree_util.register_dataclass(
    Adapter, data_fields=["arrays"], meta_fields=["rules", "weights", "stack_axes"]
)


def get_adapter(model: nnx.Module) -> Adapter:
    """Returns the adapter that `model` holds, on the arrays of its parameters at this moment.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: it holds no adapter.
    """
    check_model(model, for_linen="jax_dora.linen.split_adapters")
    layers = {found.paths[0]: found.module for found in find_dora_layers(model)}
    if not layers:
        raise ValueError("model holds no adapter; expected a model from apply_dora")
    return Adapter(
        tuple(layer.rule(re.escape(path)) for path, layer in layers.items()),
        {
            path: {name: getattr(layer, name).get_value() for name in ADAPTER_NAMES}
            for path, layer in layers.items()
        },
        adapted_weights(model),
        stack_axes(model),
    )


def stack_axes(model: nnx.Module) -> tuple[tuple[str, int], ...]:
    """Returns along which axis of its kernel each DoRA layer is stacked that is a stack, by its
    path; the first axis, of several."""
    return tuple(
        (found.paths[0], found.module.stack_axis % found.module.kernel_param.ndim)
        for found in find_modules(model)
        if isinstance(found.module, DoRALayer) and found.module.stack.shape
    )


def adapted_weights(model: nnx.Module) -> tuple[AdaptedWeight, ...]:
    """Returns where the adapters of `model` lie that stand beside weights."""
    modules = find_modules(model)
    readers = {
        (id(at_path(found.module, path)), param): (found.paths[0], path)
        for found in modules
        if has_dora_type(found.module)
        for path, param in found.module.dora_reads
    }
    return tuple(
        AdaptedWeight(
            one.path(found.paths[0]),
            found.paths[0],
            one.spec.param,
            one.spec.axes,
            *readers[id(found.module), one.spec.param],
            one.spec.is_lookup,
        )
        for found in modules
        for one in adapters_of(found.module)
    )


def find_adaptable_weights(model: nnx.Module, example: Any) -> tuple[AdaptedWeight, ...]:
    """Returns the weights of `model`, which holds no adapter, that adapters can stand beside, by
    what reads them in a call with `example`."""
    paths = {id(found.module): found.paths[0] for found in find_modules(model)}
    return tuple(
        AdaptedWeight(
            site.names[0],
            site.found.paths[0],
            site.param,
            site.axes,
            paths[id(site.reader[0])],
            site.reader[1],
            site.is_lookup,
        )
        for site in find_sites(model, trace_reads(model, Example.of(example)))
        if site.reader is not None and not site.is_layer and not site.refusal
    )


def set_adapter[Model: nnx.Module](
    model: Model, adapter: Adapter | None, *, rngs: nnx.Rngs | None = None
) -> Model:
    """Returns `model` with `adapter` in place of the one that it holds, if any; None leaves none.

        adapters = {"french": get_adapter(french), "code": get_adapter(code)}
        model = set_adapter(model, adapters["code"])

    The result is a model of its own that shares the arrays of both; magnitudes in bf16 or fp16 are
    cast to float32, as `load_adapter` does. A function compiled by
    `nnx.jit` serves every adapter of the same layers, ranks and scales without compiling again.

    An adapter's dropout is on or off as it was in the layer whose place it takes. Where that layer
    had none, it is on if anything else in `model` is in training (its `deterministic` is False),
    and off otherwise. `train()` and `eval()` of the result switch it.

    Args:
      rngs: for the masks of an adapter with dropout; only such a one needs it.

    Raises:
      TypeError: `model` is no nnx module, `adapter` no `Adapter`.
      ValueError: the adapter has a layer that the model lacks, or of another shape, or dropout and
        no rngs; or its rules are not those of its arrays. `model` is left as it is.
    """
    check_model(model, for_linen="jax_dora.linen.join_adapters")
    base = remove_dora(model)
    if adapter is None:
        return base
    if not isinstance(adapter, Adapter):
        raise TypeError(
            f"adapter is a {type(adapter).__name__}; expected an Adapter from get_adapter, or None"
        )
    rules = rules_by_path(adapter)
    layers = {path: site for site in find_sites(base) if site.is_layer for path in site.found.paths}
    for path, axis in adapter.stack_axes:
        if path in layers:
            layers[path].stack_axis = axis
    by_path = {path: found for found in find_modules(base) for path in found.paths}
    there = layers | {one.path: site_of(one, by_path) for one in adapter.weights}
    replacements: dict[int, Any] = {}
    for path, arrays in adapter.arrays.items():
        rule, site = rules[path], there.get(path)
        if site is None:
            raise ValueError(
                f"adapter has a layer {path!r}; the model's layers that can be adapted are:"
                f"{listing(layers)}"
            )
        if rule.dropout and rngs is None:
            raise ValueError(
                f"rngs is None and the adapter drops inputs of {path!r}; expected nnx.Rngs with a "
                "dropout stream"
            )
        layer = adapt_site(site, rule, rngs or nnx.Rngs(0))
        for name, value in arrays.items():
            parameter = getattr(layer, name)
            if parameter.shape != value.shape:
                raise ValueError(
                    f"adapter has {name} {value.shape} for {path!r}; this model's layer takes "
                    f"{parameter.shape}"
                )
            if name == "magnitude" and value.dtype.itemsize < parameter.dtype.itemsize:
                value = value.astype(parameter.dtype)
            parameter.set_value(value)
        if site.is_layer:
            replacements[id(site.found.module)] = layer
    return _in_the_mode_of(model, replace_modules(base, replacements))


def site_of(weight: AdaptedWeight, by_path: dict[str, Found]) -> Site | None:
    """Returns where the adapter of a weight goes; None where the model has no such weight."""
    found, reader = by_path.get(weight.module), by_path.get(weight.reader)
    if found is None or reader is None or not hasattr(found.module, weight.param):
        return None
    if getattr(found.module, weight.param).ndim < len(weight.axes):
        return None
    own = (reader.module, weight.inside)
    return Site(
        (weight.path,),
        found,
        weight.param,
        axes=weight.axes,
        reader=own,
        is_lookup=weight.is_lookup,
    )


def rules_by_path(adapter: Adapter) -> dict[str, DoRARule]:
    rules = {rule.path: rule for rule in adapter.rules}
    patterns = {path: re.escape(path) for path in adapter.arrays}
    if odd := rules.keys() ^ set(patterns.values()):
        raise ValueError(
            "adapter has rules and arrays of different layers; expected a rule for each layer that "
            f"has arrays, as get_adapter returns them. Layers not in both of:{listing(odd)}"
        )
    for path, arrays in adapter.arrays.items():
        if arrays.keys() != set(ADAPTER_NAMES):
            raise ValueError(
                f"adapter has {sorted(arrays)} for {path!r}; expected {sorted(ADAPTER_NAMES)}, all "
                "that get_adapter returns"
            )
    return {path: rules[pattern] for path, pattern in patterns.items()}


def _in_the_mode_of[Model: nnx.Module](other: nnx.Module, model: Model) -> Model:
    """Puts `model`, in place, in training or evaluation as `other` is, module by module. Dropout
    that `other` does not have is on if anything in `other` is in training."""
    others = {path: found.module for found in find_modules(other) for path in found.paths}
    trains = any(getattr(one, "deterministic", None) is False for one in others.values())
    for found in find_modules(model):
        twin = others.get(found.paths[0])
        for name in ("deterministic", "use_running_average"):
            if hasattr(twin, name) and hasattr(found.module, name):
                setattr(found.module, name, getattr(twin, name))
        if twin is None and isinstance(found.module, nnx.Dropout):
            found.module.deterministic = not trains
    return model
