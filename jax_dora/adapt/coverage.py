"""`coverage`: a table of a model's weights, which tells what is adapted and what can be adapted."""

import logging
import math
from collections.abc import Iterable
from typing import Any

from flax import nnx

from dora_common.coverage import Coverage, CoveredWeight
from jax_dora.adapt.find_sites import find_sites
from jax_dora.adapt.site import Site
from jax_dora.adapt.trace_reads import trace_reads
from jax_dora.adapt.tree import check_model, find_modules, open_linen_modules
from jax_dora.layers.quantised_kernel import act_qtype_of
from jax_dora.ops import quantised
from jax_dora.tracing.read_log import Example

_LOG = logging.getLogger("jax_dora")


def coverage(model: nnx.Module, *example: Any, **kwargs: Any) -> Coverage:
    """Returns every weight of two axes or more of `model`, and whether and how it can be adapted.

        print(jax_dora.coverage(model, tokens))

    Args:
      model: a model with or without adapters; its arrays may be abstract.
      *example, **kwargs: the inputs to call the model with, once and abstractly, to find the
        operations that read each weight: arrays or `jax.ShapeDtypeStruct`s. Or one function that
        takes the model and calls it. Without inputs, only the classes of the modules decide.

    Raises:
      TypeError: `model` is not an nnx module.
      Exception: any error of the model's call.
    """
    check_model(model, for_linen="jax_dora.linen.coverage")
    inputs = Example.of_arguments(*example, **kwargs)
    traced = trace_reads(model, inputs) if example or kwargs else None
    if any(isinstance(found.module, nnx.bridge.ToNNX) for found in find_modules(model)):
        model = nnx.clone(model, variables=False)
        open_linen_modules(model)
    return table(find_sites(model, traced))


def log_summary(sites: Iterable[Site]) -> None:
    """Logs how many weights are adapted, and their share of all elements."""
    _LOG.info(table(sites).summary())


def table(sites: Iterable[Site]) -> Coverage:
    return Coverage(tuple(_row(site) for site in sites if site.param))


def _row(site: Site) -> CoveredWeight:
    refusal = "" if site.is_adapted else _refusal(site)
    status = "adapted" if site.is_adapted else "not adaptable" if refusal else "adaptable"
    how = refusal or site.how
    value = site.parameter.get_value() if site.is_parameter else None
    if quantised.is_quantised(value):
        how += f"; {quantised.describe(value)}"
        if act_qtype := act_qtype_of(site.found.module):
            how += f", activations {act_qtype}"
    return CoveredWeight(
        site.names[0],
        site.shape,
        status,
        how,
        site.is_linear,
        4 * math.prod(site.shape) * site.merged,
    )


def _refusal(site: Site) -> str:
    """Returns why `apply_dora` would refuse the weight, whatever the rule, or ""."""
    try:
        return site.refusal or site.check() or ""
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
