"""`apply_dora`: adds adapters to an existing Flax linen module."""

from typing import Any

from flax import linen as nn

from dora_common.rules import as_rules
from jax_dora.adapt.coverage import log_summary
from jax_dora.adapt.site import Site, assign_rules, raise_for_sites
from jax_dora.layers.rule import DoRARule, Rules
from jax_dora.linen.find_sites import HiddenModule, find_linen_sites
from jax_dora.linen.module import DoRA
from jax_dora.linen.weights import LinenWeight
from jax_dora.tracing.read_log import Example


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
    be adapted too, whoever wrote the code. "all-linear" then selects all parameters that products
    read, but not embeddings and the output head. The model is called once with `example`,
    abstractly, to find the operations that read each parameter. The adapter of a parameter w is
    stored next to it, as w_lora_a, w_lora_b and w_magnitude; along the axis of a scan each layer
    has its own adapter. Any operation other than a product or a lookup gets the merged weight W';
    `jax_dora.linen.coverage` reports these.

    Args:
      model: an unbound module. Use `method=` of `init` and `apply` to call its other methods.
      rules: one rule or several; the first rule that matches a layer's path adapts it. A path is
        "a/b/c", the names of the nested dicts of its parameters.
      deterministic: True turns the rules' dropout off. False turns it on, and needs a "dropout"
        rng. None is for rules without dropout.
      example: the inputs to call the model with: a tuple of arguments, a dict of keyword arguments,
        or a function that takes the bound model and calls it. Arrays may be
        `jax.ShapeDtypeStruct`s.

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
) -> tuple[tuple[LinenWeight, ...], tuple[str, ...]]:
    """Returns the parameters that rules adapt outside layers with a DoRA class, and the paths that
    :attr:`DoRA.left_out` holds."""
    sites = [site for site in find_linen_sites(model, example) if site.is_matched]
    matched = assign_rules(sites, rules)
    raise_for_sites(
        [site for site, _ in matched if site.refusal],
        TypeError,
        "the rules match modules or weights that cannot be adapted; narrow the rules' paths so "
        "that they do not match these",
    )
    weights = {site: LinenWeight.of(site, rule) for site, rule in matched}
    for site, weight in weights.items():
        _check_names(site, weight)
        site.is_adapted = True
    log_summary(sites)
    left_out = [site.names[0] for site in sites if site.is_layer and not site.is_linear]
    left_out += [
        name
        for site in sites
        if not site.is_layer
        for name in site.names
        if any(rule.excludes(name) for rule in rules)
    ]
    traced = tuple(weight for site, weight in weights.items() if not site.is_layer)
    return traced, tuple(left_out)


def _check_names(site: Site, weight: LinenWeight) -> None:
    """Raises ValueError if the module has parameters with the names of the adapter's."""
    taken = [path for path in weight.paths().values() if hasattr(site.found.module, path[-1])]
    if taken and not site.is_adapted:
        raise ValueError(
            f"{site.names[0]!r} cannot be adapted: its module has a parameter {taken[0][-1]!r} of "
            "its own, a name that the adapter needs; expected another name: rename the parameter "
            "in the module, or leave this weight out by the rule's exclude="
        )
