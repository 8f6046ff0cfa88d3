"""Adapters into an existing nnx model."""

import contextlib
import dataclasses
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_common.rules import as_rules
from jax_dora.adapt.coverage import log_summary
from jax_dora.adapt.find_sites import REMEDY, find_sites
from jax_dora.adapt.site import Site, assign_rules, raise_for_sites
from jax_dora.adapt.trace_reads import trace_reads
from jax_dora.adapt.tree import check_model, named_in_errors, replace_modules
from jax_dora.layers import DORA_CLASSES, dora_class_of
from jax_dora.layers.base_layer import mesh_sharding, pad_axes
from jax_dora.layers.rule import DoRARule, Rules
from jax_dora.weights.module import add_adapter
from jax_dora.weights.read_log import Example
from jax_dora.weights.weight_adapter import AdapterSpec


def apply_dora[Model: nnx.Module](
    model: Model, rules: Rules, *, rngs: nnx.Rngs, example: Any = None
) -> Model:
    """Returns `model` with a fresh DoRA adapter in every layer that a rule matches.

        model = apply_dora(model, DoRARule("all-linear", rank=16, alpha=32), rngs=nnx.Rngs(0))

    The result is a model of its own, which computes what `model` did; `model` is left as it is. The
    two share the arrays of every parameter, and no array is copied. A layer keeps its dtype, its
    bias and its sharding metadata; its adapter is sharded like its kernel. A fresh adapter is there
    to be trained: its dropout is on until `model.eval()` turns it off.

    Adapted are `nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum`, `nnx.Embed`, `nnx.Conv` and
    `nnx.ConvTranspose`, also where `nnx.vmap` has stacked them for `nnx.scan`; and, in modules that
    keep their class, the parameters that `jax_dora.register` has named, among them those of public
    model libraries. A module that is shared stays shared, and a rule that matches one of its paths
    adapts it everywhere.

    With `example` every parameter of two axes or more that a matrix product or a lookup reads can
    be adapted, whoever wrote the code, and "all-linear" means all that products read but embeddings
    and the output head. The model is called once with it, abstractly, to find what reads each
    parameter: adapted are the products and lookups; whatever else reads it is given the merged
    weight W', at the cost of an array of its size, which `jax_dora.coverage` tells.

    Args:
      model: an nnx module; one of the layers above is a model too, whose path is "".
      rules: one rule or several; the first that matches a layer's path adapts it. Only modules
        that hold parameters themselves are matched, so ".*" does not stumble over containers. The
        path of a weight is that of its module, where this has several, with the parameter's name
        behind it.
      rngs: its `params` stream draws the adapters, its `dropout` stream makes their masks.
      example: what the model is called with: a tuple of arguments, a dict of keyword arguments, or
        a function that takes the model and calls it; arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      TypeError: `model` is no nnx module; a rule matches what cannot be adapted.
      ValueError: a rule adapts nothing; a matched layer is adapted already; a rule does not fit
        its layer. The message lists what is there. Or `model` is abstract, outside of
        `nnx.eval_shape`.
      NotImplementedError: a matched layer has a setting that its adapter would not honour.
    """
    check_model(model, for_linen="jax_dora.linen.apply_dora")
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs is a {type(rngs).__name__}; expected nnx.Rngs, e.g. nnx.Rngs(0)")
    rules = as_rules(DoRARule, rules)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model))):
        raise ValueError(
            "model is abstract: it holds shapes instead of arrays; expected arrays, or this call "
            "inside of nnx.eval_shape, as in nnx.eval_shape(lambda model: apply_dora(model, rules, "
            "rngs=nnx.Rngs(0)), model)"
        )
    traced = None if example is None else trace_reads(model, Example.of(example))
    copy = nnx.clone(model)
    found = find_sites(copy, traced)
    matched = assign_rules(found, rules)
    _refuse_others([site for site, _ in matched])
    replacements = {}
    for site, rule in matched:
        adapted = adapt_site(site, rule, rngs)
        if site.is_layer:
            replacements[id(site.found.module)] = adapted
        site.is_adapted = True
    log_summary(found)
    return replace_modules(copy, replacements)


def adapt_site(site: Site, rule: DoRARule, rngs: nnx.Rngs) -> Any:
    """Returns the DoRA layer over the site's module, whose parameters it shares, or the adapter
    that stands beside its weight then."""
    module, cls = site.found.module, dora_class_of(site.found.module) if site.is_layer else None
    sharding = mesh_sharding(getattr(module, cls.kernel_name if cls else site.param))
    # Flax places a parameter with sharding metadata at once, on the mesh in scope.
    scope = (
        contextlib.nullcontext() if sharding is None else jax.set_mesh(cast(Mesh, sharding.mesh))
    )
    with named_in_errors(site.names[0], "adapted"), scope:
        if cls is None:
            assert site.reader is not None
            name = "" if site.names[0] in site.found.paths else site.param
            # Initializers are not remembered: models with and without them are of one structure.
            settings = dataclasses.replace(rule, path="", lora_a_init=None, lora_b_init=None)
            spec = AdapterSpec(site.param, site.axes, name, settings, site.is_lookup)
            adapted = add_adapter(module, spec, *site.reader)
            adapted.create_arrays(rule, rngs)
        else:
            options = {"stack_axis": site.stack.axis, **rule.options()}
            adapted = cls.from_base(module, rngs=rngs, **options)
    if sharding is not None:
        _shard_like_kernel(adapted, sharding)
    return adapted


def _shard_like_kernel(adapted: Any, sharding: NamedSharding) -> None:
    stack, spec = adapted.stack, pad_axes(sharding.spec, adapted.kernel_param.ndim)
    for name, names in adapted.layout.adapter_axes(stack.layer_part(spec)).items():
        variable = getattr(adapted, name)
        of_all = stack.combine(stack.stack_part(spec), names)
        target = NamedSharding(sharding.mesh, PartitionSpec(*of_all))
        variable.set_value(jax.device_put(variable.get_value(), target))


def _refuse_others(matched: list[Site]) -> None:
    raise_for_sites(
        [site for site in matched if site.is_adapted and not site.refusal],
        ValueError,
        "a layer holds one adapter at a time, and these that the rules match hold one already: "
        "take it out with remove_dora, or merge it with merge_dora, first",
    )
    names = ", ".join(f"nnx.{base.__name__}" for base in DORA_CLASSES)
    raise_for_sites(
        [site for site in matched if site.refusal],
        TypeError,
        f"the rules match what cannot be adapted; expected {names}, and what jax_dora.register "
        f"has named: {REMEDY}, or narrow the rules' paths so that they leave out",
    )
