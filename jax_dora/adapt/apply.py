"""`apply_dora`: adds fresh adapters to an existing nnx model."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_common.rules import ALL_LINEAR, as_rules
from jax_dora.adapt import base_values
from jax_dora.adapt.adapted_class import add_adapter
from jax_dora.adapt.coverage import log_summary
from jax_dora.adapt.inventory import LINEN_REFUSAL, REMEDY, find_weights
from jax_dora.adapt.reads import record_reads
from jax_dora.adapt.tree import (
    check_model,
    find_dora_layers,
    find_modules,
    named_in_errors,
    replace_modules,
)
from jax_dora.adapt.weight import AdaptableWeight, assign_rules, raise_for
from jax_dora.layers import DORA_CLASSES, dora_class_of
from jax_dora.layers.base_layer import check_has_values, mesh_sharding, pad_axes
from jax_dora.layers.rule import DoRARule, Rules
from jax_dora.tracing.read_log import Example


def apply_dora[Model: nnx.Module](
    model: Model, rules: Rules, *, rngs: nnx.Rngs, example: Any = None
) -> Model:
    """Returns a copy of `model` with a fresh DoRA adapter in every layer that a rule matches.

        model = apply_dora(model, DoRARule("all-linear", rank=16, alpha=32), rngs=nnx.Rngs(0))

    The copy computes the same function as `model`, which stays unchanged. The two share the arrays
    of every parameter; no array is copied. A layer keeps its dtype, its bias and its sharding
    metadata, and its adapter is on the kernel's devices and sharded like it. Dropout of the fresh
    adapter is on until `model.eval()` turns it off.

    Without `example`, these can be adapted:

    - `nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum`, `nnx.Embed`, `nnx.Conv` and
      `nnx.ConvTranspose`, also if `nnx.vmap` has stacked them for `nnx.scan`.
    - Parameters that `jax_dora.register` has named, in modules that keep their class. The
      parameters of public model libraries are registered already.

    A shared module stays shared: a rule that matches one of its paths adapts it everywhere.

    With `example`, every parameter of two axes or more that a matrix product or a lookup reads can
    be adapted, whoever wrote the code. "all-linear" then selects all parameters that products read,
    but not embeddings and the output head. The model is called once with `example`, abstractly, to
    find the operations that read each parameter. Products and lookups become adapted ones. Any
    other operation gets the merged weight W', which costs an array of the weight's size;
    `jax_dora.coverage` reports these.

    Args:
      model: an nnx module. One of the layers above is a model too, with the path "".
      rules: one rule or several; the first rule that matches a layer's path adapts it. Only modules
        that hold parameters themselves are matched, so ".*" does not fail on containers. The path
        of a weight is its module's path, followed by the parameter's name if the module has several
        weights.
      rngs: its `params` stream draws the adapters, its `dropout` stream their dropout masks.
      example: the inputs to call the model with: a tuple of arguments, a dict of keyword arguments,
        or a function that takes the model and calls it. Arrays may be `jax.ShapeDtypeStruct`s.

    Raises:
      TypeError: `model` is not an nnx module, or a rule matches something that cannot be adapted.
      ValueError: a rule adapts nothing, a matched layer has an adapter already, or a rule does not
        fit its layer; the message lists what there is. Or `model` is abstract, outside
        `nnx.eval_shape`.
      NotImplementedError: a matched layer has a setting that its adapter would ignore.
    """
    check_model(model, for_linen="jax_dora.linen.apply_dora")
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs is a {type(rngs).__name__}; expected nnx.Rngs, e.g. nnx.Rngs(0)")
    rules = as_rules(DoRARule, rules)
    check_has_values(model, "jax_dora.apply_dora")
    reads = None if example is None else record_reads(model, Example.of(example))
    copy = nnx.clone(model)
    modules = find_modules(copy, opens_linen=True)
    find_dora_layers(modules)  # raises for adapters that would not belong to the others
    weights = find_weights(modules, reads)
    _check_linen(weights, rules)
    return adapt_weights(copy, weights, assign_rules(weights, rules), rngs)


def adapt_weights(
    model: Any, weights: list[AdaptableWeight], matched: list[AdaptableWeight], rngs: nnx.Rngs
) -> Any:
    """Adapts `matched`, those of all `weights` of `model` that have a rule, in place, with the
    errors of `apply_dora`. Returns `model`, or the DoRA layer that replaces `model` itself."""
    _check_adaptable(matched)
    replacements = {}
    for weight in matched:
        adapted = adapt_weight(weight, rngs)
        if weight.is_layer:
            replacements[id(weight.module)] = adapted
    paths = {weight.paths for weight in matched}
    log_summary(one.replace(is_adapted=one.is_adapted or one.paths in paths) for one in weights)
    adapted = replace_modules(model, replacements)
    base_values.remember(adapted)
    return adapted


def adapt_weight(weight: AdaptableWeight, rngs: nnx.Rngs) -> Any:
    """Adapts a weight by its rule. Returns a DoRA layer that shares the parameters of the weight's
    layer; for a weight outside of layers its new `WeightAdapter`, whose arrays are in the weight's
    module."""
    with named_in_errors(weight.path, "adapted"):
        weight.check()
    module, rule = weight.module, weight.rule
    assert rule is not None
    sharding = mesh_sharding(weight.parameter)
    # Flax shards a parameter with sharding metadata when it is created, on the current mesh.
    scope = contextlib.nullcontext() if sharding is None else _current_mesh(sharding)
    with named_in_errors(weight.path, "adapted"), scope:
        cls = dora_class_of(module) if weight.is_layer else None
        if cls is None:
            assert weight.reader is not None
            reader, inside = weight.reader
            name = "" if weight.path in weight.module_paths else weight.param
            # These are not stored, so that models with and without them have the same structure.
            unstored = dict.fromkeys(("exclude", "lora_a_init", "lora_b_init"))
            spec = AdaptableWeight(
                paths=(name,),
                module_paths=("",),
                param=weight.param,
                axes=weight.axes,
                is_lookup=weight.is_lookup,
                rule=dataclasses.replace(rule, path="", **unstored),
            )
            adapted = add_adapter(module, spec, weight.modules[reader], inside)
            adapted.create_arrays(rule, rngs)
        else:
            options = {"stack_axes": weight.stack.axes, **rule.options()}
            adapted = cls.from_base(module, rngs=rngs, **options)
    if sharding is not None:
        _shard_like_kernel(adapted, sharding)
    return adapted


def _current_mesh(sharding: NamedSharding) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which the mesh of `sharding` is current, abstract while JAX traces."""
    try:
        return jax.set_mesh(cast(Mesh, sharding.mesh))
    except ValueError:
        return jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh)


def _shard_like_kernel(adapted: Any, sharding: NamedSharding) -> None:
    stack, spec = adapted.stack, pad_axes(sharding.spec, adapted.kernel_param.ndim)
    for name, names in adapted.contraction.adapter_axes(stack.layer_part(spec)).items():
        variable = getattr(adapted, name)
        all_names = stack.combine(stack.stack_part(spec), names)
        target = NamedSharding(sharding.mesh, PartitionSpec(*all_names))
        variable.set_value(jax.device_put(variable.get_value(), target))


def _check_linen(weights: list[AdaptableWeight], rules: Sequence[DoRARule]) -> None:
    """Raises if "all-linear" would leave out the weights of a linen module without a word."""
    left_out = [
        one
        for one in weights
        if one.refusal == LINEN_REFUSAL
        or (one.variable is not None and isinstance(one.module, nnx.bridge.ToNNX))
    ]
    raise_for(
        [
            one
            for one in left_out
            if any(rule.path == ALL_LINEAR for rule in rules)
            and not any(rule.excludes(path) for rule in rules for path in one.paths)
        ],
        TypeError,
        'the rules select "all-linear", and would leave out weights of a linen module that '
        "nnx.bridge.ToNNX holds; expected inputs for the model as example=, or a rule with "
        'exclude=, such as exclude="a/.*" for a module at a. These weights would be left out',
    )


def _check_adaptable(matched: list[AdaptableWeight]) -> None:
    raise_for(
        [one for one in matched if one.is_adapted and not one.refusal],
        ValueError,
        "a layer holds one adapter at a time, and the rules match layers that hold one already; "
        "remove it with remove_dora, or merge it with merge_dora, first. These layers are",
    )
    names = ", ".join(f"nnx.{base.__name__}" for base in DORA_CLASSES)
    raise_for(
        [one for one in matched if one.refusal],
        TypeError,
        f"the rules match modules or weights that cannot be adapted; expected {names}, and "
        f"parameters that jax_dora.register has named: {REMEDY}, or narrow the rules' paths so "
        "that they do not match these",
    )
