"""`apply_dora` and `coverage` of a Flax linen module."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util

from dora_common.rules import as_rules
from jax_dora.adapt.bridge import is_adapter
from jax_dora.adapt.coverage import Coverage, log_summary, table
from jax_dora.adapt.weight import AdaptableWeight, assign_rules, raise_for
from jax_dora.layers.rule import DoRARule, Rules
from jax_dora.linen.module import DoRA
from jax_dora.linen.param_inventory import HiddenModule, adapter_paths, find_linen_weights
from jax_dora.tracing.read_log import Example, split_arrays


def apply_dora(
    model: nn.Module, rules: Rules, *, deterministic: bool | None = None, example: Any = None
) -> DoRA:
    """Returns a linen module that computes the function of `model`, with adapters where the rules
    match.

        adapted = jax_dora.linen.apply_dora(model, DoRARule("layers_0/(query|value)", 16, 32))
        _, variables = adapted.apply(
            {"params": pretrained}, x, rngs={"params": key}, mutable=["params"]
        )
        y = adapted.apply(variables, x)

    Its parameters are those of `model` under the same names, with lora_a, lora_b and magnitude next
    to each adapted kernel. If the kernel is `nn.Partitioned`, they are too. `init` creates all
    parameters. `apply` with `mutable=["params"]`, as above, creates those that are missing and
    keeps the others, even those that Flax's transforms would overwrite. `split_adapters` and
    `adapter_labels` of `jax_dora.linen` keep the base model frozen.

    Without `example`, `nn.Dense`, `nn.DenseGeneral`, `nn.Einsum`, `nn.Conv` and `nn.Embed` can be
    adapted, also inside lifted transforms such as `nn.scan` and `nn.remat`.

    With `example`, every parameter of two axes or more that a matrix product or a lookup reads can
    be adapted too, as by `jax_dora.apply_dora`. The adapter of a parameter w is stored next to it,
    as w_lora_a, w_lora_b and w_magnitude; along the axis of a scan each layer has its own adapter.

    Args:
      model: an unbound module. Use `method=` of `init` and `apply` to call its other methods.
      rules: one rule or several; the first rule that matches a layer's path adapts it. A path is
        "a/b/c", the names of the nested dicts of its parameters.
      deterministic: True turns the rules' dropout off. False turns it on, and needs a "dropout"
        rng. None is for rules without dropout.
      example: see `jax_dora.apply_dora`; a function gets the bound model.

    Raises:
      TypeError: `model` is not a linen module, an element of `rules` is not a rule, or `example`
        has the wrong type.
      ValueError: `rules` is empty, or has dropout while `deterministic` is None. With `example`
        also the errors of the call below.

    A call of the result raises TypeError if a rule matches a module that cannot be adapted, and
    ValueError if a rule adapts nothing or an adapter is missing. The message lists what there is.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a linen nn.Module: for nnx there is "
            "jax_dora.apply_dora"
        )
    checked_rules = as_rules(DoRARule, rules)
    if deterministic is None and any(rule.dropout for rule in checked_rules):
        raise ValueError(
            "deterministic is None and a rule has dropout; expected False (training) or True"
        )
    if example is None:
        return DoRA(HiddenModule(model), checked_rules, bool(deterministic))
    weights, left_out = _assign_weights(model, checked_rules, Example.of(example))
    return DoRA(HiddenModule(model), checked_rules, bool(deterministic), weights, left_out)


def _assign_weights(
    model: nn.Module, rules: tuple[DoRARule, ...], example: Example
) -> tuple[tuple[AdaptableWeight, ...], tuple[str, ...]]:
    """Returns the parameters that rules adapt outside layers, and the paths of `DoRA.left_out`."""
    every, params = find_linen_weights(model, example)
    found = [one for one in every if one.is_matched]
    matched = assign_rules(found, rules)
    raise_for(
        [one for one in matched if one.refusal],
        TypeError,
        "the rules match modules or weights that cannot be adapted; narrow the rules' paths so "
        "that they do not match these",
    )
    for weight in matched:
        weight.check_rule()
        _check_names(weight, params)
    paths = {weight.paths for weight in matched}
    log_summary(one.replace(is_adapted=one.is_adapted or one.paths in paths) for one in found)
    left_out = [one.path for one in found if one.is_layer and not one.is_linear]
    left_out += [
        path
        for one in found
        if not one.is_layer
        for path in one.paths
        if any(rule.excludes(path) for rule in rules)
    ]
    traced = tuple(one.replace(modules={}, variable=None) for one in matched if not one.is_layer)
    return traced, tuple(left_out)


def _check_names(weight: AdaptableWeight, params: Mapping[tuple[str, ...], Any]) -> None:
    """Raises ValueError if the module has parameters with the names of the adapter's."""
    taken = [path[-1] for path in adapter_paths(weight).values() if path in params]
    if taken and not weight.is_adapted:
        raise ValueError(
            f"{weight.path!r} cannot be adapted: its module has a parameter {taken[0]!r} of its "
            "own, a name that the adapter needs; expected another name: rename the parameter in "
            "the module, or leave this weight out by the rule's exclude="
        )


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
