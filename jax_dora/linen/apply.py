"""Adapters into an existing Flax linen model, as a transform of the module."""

from typing import Any

from flax import linen as nn

from dora_common.rules import as_rules
from jax_dora.adapt.coverage import log_summary
from jax_dora.adapt.site import assign_rules, raise_for_sites
from jax_dora.layers.rule import DoRARule, Rules
from jax_dora.linen.find_sites import HiddenModule, find_linen_sites
from jax_dora.linen.module import DoRA
from jax_dora.linen.weights import LinenWeight
from jax_dora.weights.read_log import Example


def apply_dora(
    model: nn.Module, rules: Rules, *, deterministic: bool | None = None, example: Any = None
) -> DoRA:
    """Returns a linen module that computes what `model` does, with adapters where the rules match.

        adapted = jax_dora.linen.apply_dora(model, DoRARule("layers_0/(query|value)", 16, 32))
        _, variables = adapted.apply(
            {"params": pretrained}, x, rngs={"params": key}, mutable=["params"]
        )
        y = adapted.apply(variables, x)

    Its parameters are `model`'s under the same names, with lora_a, lora_b and magnitude beside each
    adapted kernel (boxed like it, where it is `nn.Partitioned`). `init` makes all of them, and
    `apply` with `mutable=["params"]` makes those that are missing, as above, and keeps the others,
    also where Flax's transforms would write them. `split_adapters` and `adapter_labels` of
    `jax_dora.linen` keep the base frozen.

    Adapted are `nn.Dense`, `nn.DenseGeneral`, `nn.Einsum`, `nn.Conv` and `nn.Embed`, also inside
    lifted transforms such as `nn.scan` and `nn.remat`. And with `example` every parameter of two
    axes or more that a matrix product or a lookup reads, whoever wrote the code; "all-linear" means
    all that products read but embeddings and the output head, then. The model is called once with
    it, abstractly, to find what reads each parameter. Its adapter lies beside it, as w_lora_a,
    w_lora_b and w_magnitude beside w; along the axis of a scan each layer has its own. Whatever
    else reads it is given the merged weight W', which `jax_dora.linen.coverage` tells.

    Args:
      model: an unbound module. Its other methods are reached by `method=` of `init` and `apply`.
      rules: one rule or several; the first that matches a layer's path ("a/b/c", the names of its
        parameters' dicts) adapts it.
      deterministic: True turns the rules' dropout off, False on (it needs a "dropout" rng); None is
        for rules without dropout.
      example: what the model is called with: a tuple of arguments, a dict of keyword arguments, or
        a function that takes the bound model and calls it; arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      TypeError: `model` is no linen module, an element of `rules` no rule, or `example` none.
      ValueError: `rules` is empty, or has dropout while `deterministic` is None. With `example`
        also what the call itself would raise.

    The call itself raises TypeError for a matched module of another type, and ValueError for a rule
    that adapts nothing or an adapter that is missing. The message lists what is there.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a linen nn.Module: for nnx there is "
            "jax_dora.apply_dora"
        )
    found = as_rules(DoRARule, rules)
    if deterministic is None and any(rule.dropout for rule in found):
        raise ValueError(
            "deterministic is None and a rule has dropout; expected False (training) or True"
        )
    if example is None:
        return DoRA(HiddenModule(model), found, bool(deterministic))
    weights = _assigned(model, found, Example.of(example))
    return DoRA(HiddenModule(model), found, bool(deterministic), *weights)


def _assigned(
    model: nn.Module, rules: tuple[DoRARule, ...], example: Example
) -> tuple[tuple[LinenWeight, ...], tuple[str, ...]]:
    """Returns the parameters that rules adapt where products read them, and the paths of the layers
    that "all-linear" leaves out."""
    found = [site for site in find_linen_sites(model, example) if site.is_matched]
    matched = assign_rules(found, rules)
    raise_for_sites(
        [site for site, _ in matched if site.refusal],
        TypeError,
        "the rules match what cannot be adapted; narrow the rules' paths so that they leave out",
    )
    for site, _ in matched:
        site.is_adapted = True
    log_summary(found)
    weights = tuple(LinenWeight.of(site, rule) for site, rule in matched if not site.is_layer)
    left_out = (site.names[0] for site in found if site.is_layer and not site.is_linear)
    return weights, tuple(left_out)
