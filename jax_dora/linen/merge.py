"""Adapters of a linen model into its weights."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util
from flax.errors import ModifyScopeVariableError

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.merge_report import MergeReport
from dora_common.rules import listing
from jax_dora.adapt.merge import Setting, changed, kernel_change, reported
from jax_dora.linen.calls import Calls, noting_axes, stack_back, stack_first
from jax_dora.linen.module import DoRA
from jax_dora.linen.params import is_adapter

_TOKENS = itertools.count(1)


def merge_dora(
    adapted: DoRA,
    variables: Mapping[str, Any],
    *args: Any,
    return_report: bool = False,
    method: Any = None,
    **kwargs: Any,
) -> Any:
    """Returns the variables of `adapted.model`, with every adapter merged into its layer's kernel.

    Merged in fp32 and cast once, as `jax_dora.merge_dora`; `variables` are left as they are.

    Args:
      adapted: from `apply_dora`.
      variables: of `adapted`, "params" and its other collections, if any.
      *args, **kwargs: any inputs of the model; it is traced with them, to learn what its layers
        are, and not run.
      return_report: return a `jax_dora.adapt.MergeReport` too.
      method: the method of the model that takes these inputs; None is `__call__`.

    Returns:
      The merged variables, or these and the report.

    Raises:
      TypeError: `adapted` is not from `apply_dora`.
      ValueError, NotImplementedError: as calling it; `variables` has no "params"; an adapter is in
        no layer that the call reaches; `nn.map_variables` computes a layer's parameters.
    """
    if not isinstance(adapted, DoRA):
        raise TypeError(f"adapted is a {type(adapted).__name__}; expected apply_dora's result")
    if "params" not in variables:
        raise ValueError(
            f"variables has no collection 'params', but {list(variables)}; expected "
            "adapted's variables: pass {'params': params} where params is all there is"
        )
    calls = Calls(next(_TOKENS))
    quiet = adapted.clone(deterministic=True)
    noted = {**variables, "params": noting_axes(variables["params"])}

    def trace(mutable: list[str]) -> None:
        options = {"method": "noting", "mutable": mutable}
        jax.eval_shape(lambda: quiet.apply(noted, calls, method, *args, **options, **kwargs))

    try:
        trace([])
    except ModifyScopeVariableError:
        # The call updates other collections, as BatchNorm's statistics or a cache. They are not
        # mutable from the start because nn.map_variables(init=True) cannot be called then.
        trace([name for name in variables if name != "params"])
    params = dict(traverse_util.flatten_dict(variables["params"]))
    reached = {one.paths()["lora_a"] for one in adapted.weights}
    reached |= {(*filter(None, path.split("/")), "lora_a") for path in calls.adapted}
    all_lora_a = {path for path in params if path[-1].endswith("lora_a")}
    if missed := {path for path in all_lora_a - reached if is_adapter(path, params)}:
        raise ValueError(
            "this call of the model does not reach adapters, which would be lost; expected method= "
            "and inputs that reach every adapted layer, and rules that match it. Not reached are:"
            f"{listing(sorted(map('/'.join, missed)))}"
        )
    if calls.computed:
        raise NotImplementedError(
            "nn.map_variables computes the parameters of adapted layers from stored ones, into "
            "which no adapter can be merged; expected rules that leave such layers out, unlike for:"
            f"{listing(sorted(calls.computed))}"
        )
    layers = []

    def merge(
        told: str, kernel_path: tuple[str, ...], setting: Setting, paths: Any, axes: Any = ()
    ) -> None:
        """Merges the adapter whose arrays lie at `paths` into a kernel stacked along `axes`."""
        values = {name: nn.unbox(params.pop(path)) for name, path in paths.items()}
        boxed = params[kernel_path]
        kernel = nn.unbox(boxed)
        arrays = {
            name: stack_first(one, axes) for name, one in (values | {"kernel": kernel}).items()
        }
        change = stack_back(kernel_change(setting, **arrays), axes)
        merged = changed(kernel, change)
        params[kernel_path] = nn.meta.replace_boxed(boxed, merged)
        if return_report:
            layers.append(reported(told, kernel, change, merged))

    for one in adapted.weights:
        merge(one.names[0], one.path, Setting.of(one.adapter(params)), one.paths())
    for path, (name, setting, axes) in calls.adapted.items():
        place = tuple(path.split("/")) if path else ()
        paths = {one: (*place, one) for one in ADAPTER_NAMES}
        merge(path, (*place, name), setting, paths, axes)
    merged = {**variables, "params": traverse_util.unflatten_dict(params)}
    return (merged, MergeReport(tuple(layers))) if return_report else merged
