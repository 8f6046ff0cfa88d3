"""Adapters into an existing Flax linen model, as a transform of the module.

A linen layer is computed by its nnx counterpart: the two have the same settings and parameters, so
there is one implementation of each adapted layer.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx, traverse_util
from flax.linen.dtypes import promote_dtype

from jax_dora.adapt.kinds import KINDS, Kind
from jax_dora.adapt.merge import MergeReport, changed, kernel_change, reported
from jax_dora.adapt.rule import DoRARule, Rules, as_rules, assign, listing
from jax_dora.hyperparameters import ADAPTER_NAMES
from jax_dora.layers.layout import Layout

# The nnx counterpart of each linen layer, and what linen calls its settings.
_COUNTERPARTS: dict[type[nn.Module], tuple[type[nnx.Module], Mapping[str, str]]] = {
    nn.Dense: (nnx.Linear, {"out_features": "features"}),
    nn.DenseGeneral: (nnx.LinearGeneral, {"out_features": "features"}),
    nn.Einsum: (nnx.Einsum, {"kernel_shape": "shape"}),
    nn.Conv: (nnx.Conv, {"out_features": "features"}),
    nn.Embed: (nnx.Embed, {}),
}
_METHODS = ("__call__", "attend")


@dataclasses.dataclass
class _Calls:
    """What was called in a pass through a model.

    Attributes:
      paths: of all modules with parameters.
      adapted: by path, the name of the kernel, the layout and the scale of each adapted layer.
    """

    paths: set[str] = dataclasses.field(default_factory=set)
    adapted: dict[str, tuple[str, Layout, float]] = dataclasses.field(default_factory=dict)


def apply_dora(model: nn.Module, rules: Rules, *, deterministic: bool | None = None) -> "DoRA":
    """A linen module that computes what `model` does, with adapters where the rules match.

        adapted = jax_dora.linen.apply_dora(model, DoRARule("layers_0/(query|value)", 16, 32))
        _, variables = adapted.apply(
            {"params": pretrained}, x, rngs={"params": key}, mutable=["params"]
        )
        y = adapted.apply(variables, x)

    Its parameters are `model`'s under the same names, with lora_a, lora_b and magnitude beside each
    adapted kernel (boxed like it, where it is `nn.Partitioned`). `init` makes all of them, and
    `apply` with `mutable=["params"]` makes those that are missing, as above. `split_adapters` and
    `adapter_labels` of `jax_dora.linen` keep the base frozen.

    Adapted are `nn.Dense`, `nn.DenseGeneral`, `nn.Einsum`, `nn.Conv` and `nn.Embed`, also inside
    lifted transforms such as `nn.scan` and `nn.remat`.

    Args:
      model: an unbound module. Only its `__call__` is transformed.
      rules: one rule or several; the first that matches a layer's path ("a/b/c", the names of its
        parameters' dicts) adapts it.
      deterministic: True turns the rules' dropout off, False on (it wants a "dropout" rng); None is
        for rules without dropout.

    Raises:
      TypeError: `model` is no linen module, or an element of `rules` no rule.
      ValueError: `rules` is empty, or has dropout while `deterministic` is None.

    The call itself raises TypeError for a matched module of another type, and ValueError for a rule
    that adapts nothing or an adapter that is missing. The message lists what is there.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a linen nn.Module: for nnx there is "
            "jax_dora.apply_dora"
        )
    found = as_rules(rules)
    if deterministic is None and any(rule.dropout for rule in found):
        raise ValueError(
            "deterministic is None and a rule has dropout; expected False (training) or True"
        )
    return DoRA(model, found, bool(deterministic))


class DoRA(nn.Module):
    """What `apply_dora` returns.

    Attributes:
      model: the module without adapters.
      rules: which layers have which adapter.
      deterministic: True turns dropout off.
    """

    model: nn.Module
    rules: tuple[DoRARule, ...]
    deterministic: bool = True

    def setup(self) -> None:
        nn.share_scope(self, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `model`'s."""
        return self.noting(_Calls(), *args, **kwargs)

    def noting(self, calls: _Calls, *args: Any, **kwargs: Any) -> Any:
        """As `__call__`; adds what was called to `calls`."""
        with nn.intercept_methods(self._interceptor(calls)):
            result = self.model(*args, **kwargs)
        assign(self.rules, [(path,) for path in sorted(calls.paths)])
        return result

    def _interceptor(self, calls: _Calls) -> Callable[..., Any]:
        """Adapts the layers that are called."""

        def intercept(next_fun, args, kwargs, context):
            module, path = context.module, "/".join(context.module.path)
            if context.method_name not in _METHODS:
                return next_fun(*args, **kwargs)
            rule = next((rule for rule in self.rules if rule.matches(path)), None)
            if rule is not None and type(module) in _COUNTERPARTS:
                calls.paths.add(path)
                if not module.has_variable("params", _kind(module).kernel):
                    next_fun(*args, **kwargs)
                return _call(module, path, rule, self.deterministic, args, kwargs, context, calls)
            result = next_fun(*args, **kwargs)
            if _holds_parameters(module):
                calls.paths.add(path)
                if rule is not None:
                    names = ", ".join(kind.__name__ for kind in _COUNTERPARTS)
                    raise TypeError(
                        f"rule {rule.path!r} matches a module that cannot be adapted; expected "
                        f"{names} alone: narrow the rule's path so that it leaves out:"
                        f"{listing([f'{path} ({type(module).__name__})'])}"
                    )
            return result

        return intercept


def merge_dora(
    adapted: DoRA,
    variables: Mapping[str, Any],
    *args: Any,
    return_report: bool = False,
    **kwargs: Any,
) -> Any:
    """The variables of `adapted.model`, with every adapter merged into its layer's kernel.

    Merged in fp32 and cast once, as `jax_dora.merge_dora`; `variables` are left as they are.

    Args:
      adapted: from `apply_dora`.
      variables: of `adapted`, "params" and its other collections, if any.
      *args, **kwargs: any inputs of the model; it is traced with them, to learn what its layers
        are, and not run.
      return_report: return a `jax_dora.adapt.MergeReport` too.

    Returns:
      The merged variables, or these and the report.

    Raises:
      TypeError: `adapted` is not from `apply_dora`.
      ValueError, NotImplementedError: as calling it; `variables` has no "params"; a stack's axis is
        not the leading one.
    """
    if not isinstance(adapted, DoRA):
        raise TypeError(f"adapted is a {type(adapted).__name__}; expected apply_dora's result")
    if "params" not in variables:
        raise ValueError(
            f"variables has no collection 'params', but {list(variables)}; expected "
            "adapted's variables: pass {'params': params} where params is all there is"
        )
    calls = _Calls()
    quiet = adapted.clone(deterministic=True)
    jax.eval_shape(lambda: quiet.apply(variables, calls, *args, method="noting", **kwargs))
    params = dict(traverse_util.flatten_dict(variables["params"]))
    layers = []
    for path, (name, layout, scale) in calls.adapted.items():
        place = tuple(path.split("/")) if path else ()
        values = {one: nn.unbox(params.pop((*place, one))) for one in ADAPTER_NAMES}
        boxed = params[*place, name]
        kernel = nn.unbox(boxed)
        if kernel.shape[kernel.ndim - len(layout.kernel.stored) :] != layout.kernel.stored:
            raise NotImplementedError(
                f"the kernel of {path!r} has shape {kernel.shape}; expected {layout.kernel.stored} "
                "behind the axes of a stack: use variable_axes={'params': 0}"
            )
        change = kernel_change(layout, scale, kernel=kernel, **values)
        params[*place, name] = nn.meta.replace_boxed(boxed, changed(kernel, change))
        if return_report:
            layers.append(reported(path, kernel, change))
    merged = {**variables, "params": traverse_util.unflatten_dict(params)}
    return (merged, MergeReport(tuple(layers))) if return_report else merged


def _call(module, path, rule, deterministic, args, kwargs, context, calls) -> jax.Array:
    """The adapted layer's result; makes the adapter where it is missing."""
    signature = inspect.signature(context.orig_method)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    inputs = arguments.pop(next(iter(arguments)))
    kind = _kind(module)
    boxed = module.get_variable("params", kind.kernel)
    bias = module.get_variable("params", "bias") if getattr(module, "use_bias", False) else None
    missing = [name for name in ADAPTER_NAMES if not module.has_variable("params", name)]
    if missing and not (len(missing) == 3 and module.is_mutable_collection("params")):
        raise ValueError(
            f"params has no {missing[0]} for {path!r}; expected the adapter there: make it with "
            'init, or with apply(…, rngs={"params": key}, mutable=["params"])'
        )
    key = module.make_rng("params") if missing else jax.random.key(0)
    try:
        base = _counterpart(module, inputs, nn.unbox(boxed), nn.unbox(bias), **arguments)
        layer = kind.adapted_by(base, rule, nnx.Rngs(key))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"{path!r} cannot be adapted: {error}") from error
    if missing:
        axes = kind.adapter_axes(layer, _names(boxed))
        for name in ADAPTER_NAMES:
            module.put_variable("params", name, _box(boxed, getattr(layer, name)[...], axes[name]))
    for name in ADAPTER_NAMES:
        parameter, value = getattr(layer, name), nn.unbox(module.get_variable("params", name))
        if parameter.shape != value.shape:
            raise ValueError(
                f"params has {name} {value.shape} for {path!r}; this rule's layer takes "
                f"{parameter.shape}"
            )
        parameter.set_value(value)
    calls.adapted[path] = (kind.kernel, kind.layout(layer), layer.scale)
    if context.method_name == "attend":
        return layer.attend(inputs)
    if layer.dropout is None:
        return layer(inputs)
    key = None if deterministic else module.make_rng("dropout")
    return layer(inputs, deterministic=deterministic, rngs=key)


def _counterpart(
    module: Any, inputs: jax.Array, kernel: jax.Array, bias: jax.Array | None, **arguments: Any
) -> Any:
    """The nnx layer with the settings of `module`, over its very parameters."""
    counterpart, renamed = _COUNTERPARTS[type(module)]
    settings: dict[str, Any] = {"rngs": _NoRngs()}
    for name in inspect.signature(counterpart.__init__).parameters:
        if name.endswith("_init"):
            value = bias if name == "bias_init" else kernel
            settings[name] = functools.partial(_given, value)
        elif getattr(module, renamed.get(name, name), None) is not None:
            settings[name] = getattr(module, renamed.get(name, name))
    if settings.pop("promote_dtype") is not promote_dtype:
        raise NotImplementedError("promote_dtype is not Flax's; expected the default")
    for name in ("dot_general_cls", "conv_general_dilated_cls"):
        if getattr(module, name, None) is not None:
            raise NotImplementedError(f"{name} is {getattr(module, name)}; expected None")
    settings |= {name: value for name, value in arguments.items() if value is not None}
    if counterpart is nnx.Linear:
        settings["in_features"] = kernel.shape[0]
    elif counterpart is nnx.LinearGeneral:
        axes = sorted(axis % inputs.ndim for axis in _as_tuple(module.axis))
        settings["axis"] = tuple(axes)
        settings["in_features"] = tuple(inputs.shape[axis] for axis in axes)
        settings["batch_axis"] = {axis: inputs.shape[axis] for axis in _as_tuple(module.batch_dims)}
    elif counterpart is nnx.Conv:
        settings["in_features"] = kernel.shape[-2] * module.feature_group_count
    elif counterpart is nnx.Einsum:
        settings["bias_shape"] = None if bias is None else bias.shape
    make: Callable[..., Any] = counterpart
    return make(**settings)


class _NoRngs:
    """For a layer whose parameters are given."""

    def params(self) -> None:
        return None


def _given(value: Any, *_: Any) -> Any:
    return value


def _kind(module: nn.Module) -> Kind:
    counterpart, _ = _COUNTERPARTS[type(module)]
    return next(kind for kind in KINDS if kind.base is counterpart)


def _as_tuple(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _names(boxed: Any) -> tuple[Any, ...]:
    if isinstance(boxed, nn.Partitioned):
        return tuple(boxed.names)
    return (None,) * nn.unbox(boxed).ndim


def _box(kernel: Any, value: jax.Array, names: tuple[Any, ...]) -> Any:
    return kernel.replace(value=value, names=names) if isinstance(kernel, nn.Partitioned) else value


def _holds_parameters(module: nn.Module) -> bool:
    params = module.variables.get("params", {})
    return any(not isinstance(leaf, Mapping) for leaf in params.values())
