"""Adapters into an existing nnx model."""

import contextlib
from typing import Any, cast

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_common.rules import as_rules, assign, listing
from jax_dora.adapt.stack import adapt_stack, stack_shape
from jax_dora.adapt.tree import Found, check_model, find_modules, is_node, replace_modules
from jax_dora.layers import DORA_CLASSES, DoRALayer, dora_class_of
from jax_dora.layers.base_layer import padded
from jax_dora.layers.rule import DoRARule, Rules


def apply_dora[Model: nnx.Module](model: Model, rules: Rules, *, rngs: nnx.Rngs) -> Model:
    """Returns `model` with a fresh DoRA adapter in every layer that a rule matches.

        model = apply_dora(model, DoRARule("all-linear", rank=16, alpha=32), rngs=nnx.Rngs(0))

    The result is a model of its own, which computes what `model` did; `model` is left as it is. The
    two share the arrays of every parameter, and no array is copied. A layer keeps its dtype, its
    bias and its sharding metadata; its adapter is sharded like its kernel. A fresh adapter is there
    to be trained: its dropout is on until `model.eval()` turns it off.

    Adapted are `nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum`, `nnx.Embed` and `nnx.Conv`, also
    where `nnx.vmap` has stacked them along leading axes for `nnx.scan`. A module that is shared
    stays shared, and a rule that matches one of its paths adapts it everywhere.

    Args:
      model: an nnx module; one of the layers above is a model too, whose path is "".
      rules: one rule or several; the first that matches a layer's path adapts it. Only modules
        that hold parameters themselves are matched, so ".*" does not stumble over containers.
      rngs: its `params` stream draws the adapters, its `dropout` stream makes their masks.

    Raises:
      TypeError: `model` is no nnx module; a matched module is of another type.
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
    copy = nnx.clone(model)
    layers = [found for found in find_modules(copy) if _holds_parameters(found.module)]
    chosen = assign(
        rules, [one.paths for one in layers], [_is_linear(one.module) for one in layers]
    )
    matched = [(found, rule) for found, rule in zip(layers, chosen, strict=True) if rule]
    _refuse_others([found for found, _ in matched])
    replacements = {}
    for found, rule in matched:
        replacements[id(found.module)] = adapt_layer(found, rule, rngs)
    return replace_modules(copy, replacements)


def adapt_layer(found: Found, rule: DoRARule, rngs: nnx.Rngs) -> Any:
    """Returns the DoRA layer over `found.module`, whose parameters it shares."""
    layer, cls = found.module, dora_class_of(found.module)
    assert cls is not None
    sharding = _mesh_sharding(getattr(layer, cls.kernel_name))

    def adapt(one: Any) -> DoRALayer:
        return cls.from_base(one, rngs=rngs, **rule.options())

    try:
        with contextlib.ExitStack() as scope:
            if sharding is not None:
                # Flax places a parameter with sharding metadata at once, on the mesh in scope.
                scope.enter_context(jax.set_mesh(cast(Mesh, sharding.mesh)))
            shape = stack_shape(layer)
            adapted = adapt_stack(layer, shape, adapt) if shape else adapt(layer)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"{found.paths[0]!r} cannot be adapted: {error}") from error
    if sharding is not None:
        _shard_like_kernel(adapted, sharding, len(shape))
    return adapted


def _shard_like_kernel(adapted: DoRALayer, sharding: NamedSharding, lead: int) -> None:
    spec = padded(sharding.spec, adapted.kernel_param().ndim)
    for name, names in adapted.adapter_axes(spec[lead:]).items():
        variable = getattr(adapted, name)
        target = NamedSharding(sharding.mesh, PartitionSpec(*spec[:lead], *names))
        variable.set_value(jax.device_put(variable.get_value(), target))


def _mesh_sharding(variable: nnx.Variable) -> NamedSharding | None:
    """Returns how a concrete array lies on a mesh of its own."""
    value = variable.get_value()
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        sharding = value.sharding
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding
    return None


def _refuse_others(matched: list[Found]) -> None:
    def named(found: Found) -> str:
        return f"{found.paths[0]} ({type(found.module).__name__})"

    adapted = [named(one) for one in matched if isinstance(one.module, DoRALayer)]
    if adapted:
        raise ValueError(
            "a layer holds one adapter at a time, and these that the rules match hold one already: "
            f"take it out with remove_dora, or merge it with merge_dora, first:{listing(adapted)}"
        )
    others = [named(one) for one in matched if dora_class_of(one.module) is None]
    if others:
        names = ", ".join(base.__name__ for base in DORA_CLASSES)
        raise TypeError(
            f"the rules match modules that cannot be adapted; expected {names} alone: narrow the "
            f"rules' paths so that they leave out:{listing(others)}"
        )


def _is_linear(module: nnx.Module) -> bool:
    """Whether "all-linear" means this layer, adapted or not. A subclass that computes something
    else is no linear projection."""
    if isinstance(module, DoRALayer):
        return module.is_linear(module)
    cls = dora_class_of(module)
    if cls is None or type(module).__call__ is not cls.base_type.__call__:
        return False
    return cls.is_linear(module)


def _holds_parameters(module: nnx.Module) -> bool:
    leaves = jax.tree.leaves(vars(module), is_leaf=is_node)
    return any(isinstance(leaf, nnx.Param) for leaf in leaves)
