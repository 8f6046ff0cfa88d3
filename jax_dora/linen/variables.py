"""`merge_dora` and `reset_magnitudes`: new variables of an adapted linen model."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util
from flax.errors import ModifyScopeVariableError

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.merge_report import MergeReport
from dora_common.rules import listing
from jax_dora.adapt.bridge import is_adapter
from jax_dora.adapt.merge import Setting, add_change, check_arrays, kernel_change, report_entry
from jax_dora.layers.base_layer import check_has_values
from jax_dora.linen.call_log import CallLog, record_axes, stack_back, stack_first
from jax_dora.linen.module import DoRA
from jax_dora.linen.param_inventory import adapter_paths
from jax_dora.linen.weights import adapter_of, weight_path

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

    The merge is computed in fp32 and cast once, as in `jax_dora.merge_dora`. `variables` stays
    unchanged.

    Args:
      adapted: the result of `apply_dora`.
      variables: the variables of `adapted`: "params", and its other collections if there are any.
      *args, **kwargs: any inputs of the model. It is only traced with them, not run, to find its
        layers.
      return_report: also return a `dora_common.merge_report.MergeReport`.
      method: the method of the model that takes these inputs; None is `__call__`.

    Returns:
      The merged variables, or (merged variables, report).

    Raises:
      TypeError: `adapted` is not a result of `apply_dora`.
      ValueError, NotImplementedError: the errors of calling the model. Or `variables` has no
        "params", the call does not reach an adapter's layer, an adapter contains NaN or infinity,
        or `nn.map_variables` computes a layer's parameters.
    """
    if not isinstance(adapted, DoRA):
        raise TypeError(f"adapted is a {type(adapted).__name__}; expected the result of apply_dora")
    if "params" not in variables:
        raise ValueError(
            f"variables has no collection 'params', only {list(variables)}; expected the variables "
            "of adapted: pass {'params': params} if params is the only collection"
        )
    can_trace = not return_report
    function = "jax_dora.linen.merge_dora"
    check_has_values(variables, function, name="one of variables", can_trace=can_trace)
    calls = CallLog(next(_TOKENS))
    quiet = adapted.clone(deterministic=True)
    recorded = {**variables, "params": record_axes(variables["params"])}

    def trace(mutable: list[str]) -> None:
        options = {"method": "call_logged", "mutable": mutable}
        jax.eval_shape(lambda: quiet.apply(recorded, calls, method, *args, **options, **kwargs))

    _with_few_mutable(trace, [], [name for name in variables if name != "params"])
    params = dict(traverse_util.flatten_dict(variables["params"]))
    reached = {adapter_paths(weight)["lora_a"] for weight in adapted.weights}
    reached |= {(*filter(None, path.split("/")), "lora_a") for path in calls.adapted}
    all_lora_a = {path for path in params if path[-1].endswith("lora_a")}
    if missed := {path for path in all_lora_a - reached if is_adapter(path, params)}:
        raise ValueError(
            "this call of the model does not reach all adapters, and merging would lose those "
            "that are not reached; expected method= and inputs that reach every adapted layer, "
            "and rules that match it. Not reached are:"
            f"{listing(sorted(map('/'.join, missed)))}"
        )
    if calls.computed:
        raise NotImplementedError(
            "nn.map_variables computes the parameters of adapted layers, and no adapter can be "
            "merged into computed parameters; expected rules that do not match such layers. These "
            "are:"
            f"{listing(sorted(calls.computed))}"
        )
    layers, adapters = [], {}

    def merge(
        name: str, kernel_path: tuple[str, ...], setting: Setting, paths: Any, axes: Any = ()
    ) -> None:
        """Merges the adapter with its arrays at `paths` into a kernel stacked along `axes`."""
        values = {key: nn.unbox(params.pop(path)) for key, path in paths.items()}
        adapters.update({f"{key} of {name!r}": array for key, array in values.items()})
        boxed = params[kernel_path]
        kernel = nn.unbox(boxed)
        arrays = {
            key: stack_first(array, axes) for key, array in (values | {"kernel": kernel}).items()
        }
        change = stack_back(kernel_change(setting, **arrays), axes)
        merged = add_change(kernel, change)
        params[kernel_path] = nn.meta.replace_boxed(boxed, merged)
        if return_report:
            layers.append(report_entry(name, kernel, change, merged))

    for weight in adapted.weights:
        setting = Setting.of(adapter_of(weight, params))
        merge(weight.path, weight_path(weight), setting, adapter_paths(weight))
    for path, (kernel_name, setting, axes) in calls.adapted.items():
        module_path = tuple(path.split("/")) if path else ()
        paths = {name: (*module_path, name) for name in ADAPTER_NAMES}
        merge(path, (*module_path, kernel_name), setting, paths, axes)
    check_arrays(adapters)
    merged = {**variables, "params": traverse_util.unflatten_dict(params)}
    return (merged, MergeReport(tuple(layers))) if return_report else merged


def reset_magnitudes(
    adapted: nn.Module, variables: Mapping[str, Any], *args: Any, method: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Returns `variables` with every magnitude set to the current norm of its layer, so that g = 1.

    Call this after other weights were put into the parameters of an adapted model; see
    `jax_dora.reset_magnitudes`. `variables` stays unchanged.

        variables = reset_magnitudes(adapted, {"params": {**params, **pretrained}}, x)

    Args:
      adapted: the result of `apply_dora`, or a model that contains `DoRADense`.
      variables: the variables of `adapted`: "params", and its other collections if there are any.
      *args, **kwargs: any inputs of the model, which is called with them to find its layers.
      method: the method of the model that takes these inputs; None is `__call__`.

    Raises:
      ValueError: `variables` has no magnitude, or the call does not reach the layer of each.
      Exception: any error of calling the model.
    """
    flat = traverse_util.flatten_dict(variables.get("params", {}))
    magnitudes = {path for path in flat if path[-1].endswith("magnitude")}
    magnitudes = {path for path in magnitudes if is_adapter(path, flat)}
    if not magnitudes:
        raise ValueError(
            "variables has no magnitude in params; expected the variables of a model with "
            'adapters: create them by init, or by apply with mutable=["params"]'
        )
    params = {path: leaf for path, leaf in flat.items() if path not in magnitudes}
    quiet = adapted.clone(deterministic=True) if isinstance(adapted, DoRA) else adapted
    others = {**variables, "params": traverse_util.unflatten_dict(params)}
    rngs = {"params": jax.random.key(0)}  # Nothing is drawn: only norms are missing.

    def call(mutable: list[str]) -> Any:
        options: Any = {"rngs": rngs, "mutable": mutable, "method": method}
        _, made = quiet.apply(others, *args, **options, **kwargs)
        return traverse_util.flatten_dict(made["params"])

    found = _with_few_mutable(call, ["params"], [*others])
    if missed := sorted("/".join(path) for path in magnitudes - found.keys()):
        raise ValueError(
            f"this call of the model does not reach {missed}; expected method= and inputs that "
            "reach every adapted layer"
        )
    new = {path: found[path] if path in magnitudes else leaf for path, leaf in flat.items()}
    return {**variables, "params": traverse_util.unflatten_dict(new)}


def _with_few_mutable(call: Callable[[list[str]], Any], few: list[str], many: list[str]) -> Any:
    """Returns `call(few)` or, if the call updates other collections, such as BatchNorm's statistics
    or a cache, `call(many)`: with these nn.map_variables(init=True) cannot be called."""
    try:
        return call(few)
    except ModifyScopeVariableError:
        return call(many)
