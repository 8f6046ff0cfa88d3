"""`coverage`: a table of a model's weights, which tells what is adapted and what can be adapted."""

import logging
from collections.abc import Iterable
from typing import Any

from flax import nnx

from dora_common.coverage import Coverage
from jax_dora.adapt.inventory import find_weights
from jax_dora.adapt.reads import record_reads
from jax_dora.adapt.tree import check_model, find_modules
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers.quantised_kernel import formats_of
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
    reads = record_reads(model, inputs) if example or kwargs else None
    modules = find_modules(model)
    if any(isinstance(module, nnx.bridge.ToNNX) for module in modules.values()):
        modules = find_modules(nnx.clone(model, variables=False), opens_linen=True)
    return table(find_weights(modules, reads))


def log_summary(weights: Iterable[AdaptableWeight]) -> None:
    """Logs how many weights are adapted, and their share of all elements."""
    _LOG.info(table(weights).summary())


def table(weights: Iterable[AdaptableWeight]) -> Coverage:
    return Coverage(tuple(_row(weight) for weight in weights if weight.param))


def _row(weight: AdaptableWeight) -> AdaptableWeight:
    """Returns a weight without its model, with all that is known in `how`."""
    refusal = "" if weight.is_adapted else _refusal(weight)
    how = refusal or weight.how
    value = weight.parameter.get_value() if weight.is_parameter else None
    if quantised.is_quantised(value):
        how += f"; {quantised.describe(value)}"
        names = {"act_qtype": "activations", "bwd_qtype": "gradients"}
        for name, qtype in formats_of(weight.module).items():
            how += f", {names[name]} {qtype}" if qtype else ""
    return weight.replace(refusal=refusal, how=how, modules={}, variable=None)


def _refusal(weight: AdaptableWeight) -> str:
    """Returns why `apply_dora` would refuse the weight, whatever the rule, or ""."""
    try:
        return weight.refusal or weight.check() or ""
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
