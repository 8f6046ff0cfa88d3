"""Adapters into an existing Flax linen model, as a transform of the module."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util
from flax.core import freeze

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.merge_report import MergeReport
from dora_common.rules import as_rules, assign, listing
from jax_dora.adapt.merge import Setting, changed, kernel_change, reported
from jax_dora.layers import DoRALayer
from jax_dora.layers.rule import DoRARule, Rules
from jax_dora.linen.layer import COUNTERPARTS, counterpart, dora_class_of, dora_layer
from jax_dora.linen.stacks import noting_axes, stack_axes, stack_back, stack_first

_METHODS = ("__call__", "attend")
_TOKENS = itertools.count(1)


@dataclasses.dataclass
class _Calls:
    """What was called in a pass through a model.

    Attributes:
      linear: whether it is a linear projection, by the path of every module with parameters.
      adapted: by path, the name of the kernel and the setting of each adapted layer.
      stacks: by path, the axis along which each transform around a layer has stacked its kernel,
        the outermost first.
      token: differs where a pass has to be traced anew.
    """

    token: int = 0
    linear: dict[str, bool] = dataclasses.field(default_factory=dict)
    adapted: dict[str, tuple[str, Setting]] = dataclasses.field(default_factory=dict)
    stacks: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def apply_dora(model: nn.Module, rules: Rules, *, deterministic: bool | None = None) -> "DoRA":
    """Returns a linen module that computes what `model` does, with adapters where the rules match.

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
      model: an unbound module. Its other methods are reached by `method=` of `init` and `apply`.
      rules: one rule or several; the first that matches a layer's path ("a/b/c", the names of its
        parameters' dicts) adapts it.
      deterministic: True turns the rules' dropout off, False on (it needs a "dropout" rng); None is
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
    found = as_rules(DoRARule, rules)
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
        return self.noting(_Calls(), None, *args, **kwargs)

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """As `nn.Module.apply`; `method` is one of `model`'s."""
        return super().apply(variables, *args, method=self._routed(method), **kwargs)

    @nn.nowrap
    def init_with_output(self, rngs: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """As `nn.Module.init_with_output`; `method` is one of `model`'s."""
        return super().init_with_output(rngs, *args, method=self._routed(method), **kwargs)

    @nn.nowrap
    def _routed(self, method: Any) -> Any:
        if method is None or (isinstance(method, str) and hasattr(type(self), method)):
            return method

        def run(adapted: DoRA, *args: Any, **kwargs: Any) -> Any:
            return adapted.noting(_Calls(), method, *args, **kwargs)

        return run

    def noting(self, calls: _Calls, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of `model`, `__call__` if None, and adds what it called to `calls`."""
        scope: Any = self.scope
        # What nn.jit has traced under other rules, or noted elsewhere, is no trace of this call.
        key = hash((self.rules, self.deterministic, calls.token))
        scope.flags = freeze({**scope.flags, "jax_dora": key})
        if callable(method):
            call = functools.partial(method, self.model)
        else:
            call = getattr(self.model, method or "__call__")
        with nn.intercept_methods(self._interceptor(calls)):
            result = call(*args, **kwargs)
        linear = dict.fromkeys(_adapted_paths(self.variables.get("params", {})), True)
        linear |= calls.linear
        paths = sorted(linear)
        assign(self.rules, [(path,) for path in paths], [linear[path] for path in paths])
        return result

    def _interceptor(self, calls: _Calls) -> Callable[..., Any]:
        """Adapts the layers that are called."""

        def intercept(next_fun, args, kwargs, context):
            module, path = context.module, "/".join(context.module.path)
            if context.method_name not in _METHODS:
                return next_fun(*args, **kwargs)
            cls = dora_class_of(module)
            is_linear = cls is not None and cls.is_linear(module)
            matching = (rule for rule in self.rules if rule.matches(path, linear=is_linear))
            rule = next(matching, None)
            if rule is not None and cls is not None:
                calls.linear[path] = is_linear
                if not module.has_variable("params", cls.kernel_name):
                    next_fun(*args, **kwargs)
                signature = inspect.signature(context.orig_method)
                arguments = dict(signature.bind(*args, **kwargs).arguments)
                layer = _adapted(module, cls, rule, arguments)
                calls.stacks[path] = stack_axes(module)
                calls.adapted[path] = (cls.kernel_name, Setting.of(layer))
                return self._result(layer, context, next(iter(arguments.values())))
            result = next_fun(*args, **kwargs)
            if _holds_parameters(module):
                calls.linear[path] = is_linear
                if rule is not None:
                    names = ", ".join(one.__name__ for one in COUNTERPARTS)
                    raise TypeError(
                        f"rule {rule.path!r} matches a module that cannot be adapted; expected "
                        f"{names} alone: narrow the rule's path so that it leaves out:"
                        f"{listing([f'{path} ({type(module).__name__})'])}"
                    )
            return result

        return intercept

    def _result(self, layer: Any, context: Any, inputs: jax.Array) -> jax.Array:
        if context.method_name == "attend":
            return layer.attend(inputs)
        if layer.dropout is None:
            return layer(inputs)
        key = None if self.deterministic else context.module.make_rng("dropout")
        return layer(inputs, deterministic=self.deterministic, rngs=key)


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
        no layer that the call reaches.
    """
    if not isinstance(adapted, DoRA):
        raise TypeError(f"adapted is a {type(adapted).__name__}; expected apply_dora's result")
    if "params" not in variables:
        raise ValueError(
            f"variables has no collection 'params', but {list(variables)}; expected "
            "adapted's variables: pass {'params': params} where params is all there is"
        )
    calls = _Calls(next(_TOKENS))
    quiet = adapted.clone(deterministic=True)
    noted = {**variables, "params": noting_axes(variables["params"])}
    jax.eval_shape(lambda: quiet.apply(noted, calls, method, *args, method="noting", **kwargs))
    params = dict(traverse_util.flatten_dict(variables["params"]))
    if missed := sorted(set(_adapted_paths(variables["params"])) - calls.adapted.keys()):
        raise ValueError(
            "this call of the model does not reach adapters, which could not be merged; expected "
            f"method= and inputs that reach every adapted layer:{listing(missed)}"
        )
    layers = []
    for path, (name, setting) in calls.adapted.items():
        place = tuple(path.split("/")) if path else ()
        values = {one: nn.unbox(params.pop((*place, one))) for one in ADAPTER_NAMES}
        boxed = params[*place, name]
        kernel = nn.unbox(boxed)
        axes = calls.stacks[path]
        change = kernel_change(
            setting,
            kernel=stack_first(kernel, axes),
            **{one: stack_first(value, axes) for one, value in values.items()},
        )
        change = stack_back(change, axes)
        merged = changed(kernel, change)
        params[*place, name] = nn.meta.replace_boxed(boxed, merged)
        if return_report:
            layers.append(reported(path, kernel, change, merged))
    merged = {**variables, "params": traverse_util.unflatten_dict(params)}
    return (merged, MergeReport(tuple(layers))) if return_report else merged


def _adapted(
    module: nn.Module, cls: type[DoRALayer], rule: DoRARule, arguments: Mapping[str, Any]
) -> DoRALayer:
    """Returns the DoRA layer in the place of `module`, called with these arguments."""
    (_, inputs), *others = arguments.items()
    kernel = module.get_variable("params", cls.kernel_name)
    try:
        base = counterpart(module, inputs, kernel, **dict(others))
        return dora_layer(module, cls, base, rule, kernel)
    except (TypeError, ValueError, NotImplementedError) as error:
        path = "/".join(module.path)
        raise type(error)(f"{path!r} cannot be adapted: {error}") from error


def _holds_parameters(module: nn.Module) -> bool:
    params = module.variables.get("params", {})
    return any(not isinstance(leaf, Mapping) for leaf in params.values())


def _adapted_paths(params: Mapping[str, Any]) -> list[str]:
    """Returns the path of every module that has an adapter in `params`."""
    return [
        "/".join(path[:-1]) for path in traverse_util.flatten_dict(params) if path[-1] == "lora_a"
    ]
