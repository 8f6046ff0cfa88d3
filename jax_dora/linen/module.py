"""`DoRA`: the linen module that calls another module with adapters."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util
from flax.core import freeze

from dora_common.rules import assign, listing
from jax_dora.adapt.merge import Setting
from jax_dora.adapt.tree import named_in_errors
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers.rule import DoRARule
from jax_dora.linen.call_log import CallLog, has_computed_params, holds_parameters, stack_axes
from jax_dora.linen.layer import (
    COUNTERPARTS,
    check_own_names,
    counterpart,
    dora_class_of,
    dora_layer,
)
from jax_dora.linen.param_inventory import HiddenModule, adapter_paths
from jax_dora.linen.params import adapted_modules
from jax_dora.linen.weights import (
    create_params,
    trace_adapted_params,
    weight_path,
    weights_without_adapter,
)
from jax_dora.tracing.trace import weight_trace

_METHODS = ("__call__", "attend")
# These modules call a layer with parameters that they compute from the layer's own.
_PARAMETER_WRITERS = (nn.WeightNorm, nn.SpectralNorm)


class DoRA(nn.Module):
    """Computes the function of `model` with adapters. `apply_dora` returns it.

    Attributes:
      held: the module without adapters, in a `HiddenModule`.
      rules: the rules that select the adapted layers.
      deterministic: True turns dropout off.
      weights: the parameters that are adapted outside layers with a DoRA class.
      left_out: the paths of layers that "all-linear" does not select, although their class and name
        would allow it, and of parameters outside such layers that a rule excludes.
    """

    held: HiddenModule
    rules: tuple[DoRARule, ...]
    deterministic: bool = True
    weights: tuple[AdaptableWeight, ...] = ()
    left_out: tuple[str, ...] = ()

    def setup(self) -> None:
        self.bound = self.held.within(self.scope)

    @property
    def model(self) -> nn.Module:
        """The module without adapters, unbound."""
        return self.held.module

    @nn.nowrap
    def matches(self, path: str, is_linear: bool) -> bool:
        """Returns whether a rule of this module, or of a `DoRA` module that it wraps, matches the
        layer."""
        inner = self.model
        is_inner = isinstance(inner, DoRA) and inner.matches(path, is_linear)
        return is_inner or any(rule.matches(path, linear=is_linear) for rule in self.rules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `model` with its adapters."""
        return self.call_logged(CallLog(), None, *args, **kwargs)

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Like `nn.Module.apply`; `method` is a method of `model`."""
        return super().apply(variables, *args, method=self._bind_method(method), **kwargs)

    @nn.nowrap
    def init_with_output(self, rngs: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Like `nn.Module.init_with_output`; `method` is a method of `model`."""
        return super().init_with_output(rngs, *args, method=self._bind_method(method), **kwargs)

    @nn.nowrap
    def _bind_method(self, method: Any) -> Any:
        """Returns a function of a bound `DoRA` that calls `method` of `model`; None and the name of
        a method of `DoRA` are returned unchanged."""
        if method is None or (isinstance(method, str) and hasattr(type(self), method)):
            return method

        def run(adapted: DoRA, *args: Any, **kwargs: Any) -> Any:
            return adapted.call_logged(CallLog(), method, *args, **kwargs)

        return run

    def call_logged(self, calls: CallLog, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of `model`, `__call__` if `method` is None, and records the called layers
        in `calls`."""
        scope: Any = self.scope
        # The flag is part of nn.jit's cache key. A trace under other rules, or one that recorded
        # into another log, must not be used for this call.
        key = hash((self.rules, self.deterministic, self.weights, self.left_out, calls.token))
        scope.flags = freeze({**scope.flags, "jax_dora": key})

        def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if callable(method):
                return method(model, *args, **kwargs)
            return getattr(model, method or "__call__")(*args, **kwargs)

        with nn.intercept_methods(_Interceptor(self, calls)):
            result = self._run_adapted(calls, run, *args, **kwargs)
        linear = dict.fromkeys(adapted_modules(self.variables.get("params", {})), True)
        linear |= calls.linear
        # A call does not show which parameters outside layers it reads.
        excluded = [p for p in self.left_out if any(rule.excludes(p) for rule in self.rules)]
        linear = dict.fromkeys(excluded, False) | linear
        names = {(path,): is_linear for path, is_linear in linear.items()}
        names |= {weight.paths: weight.is_linear for weight in self.weights}
        paths = sorted(names)
        # Raises ValueError if a rule adapts nothing.
        assign(self.rules, paths, [names[path] for path in paths])
        return result

    @nn.nowrap
    def _run_adapted(
        self, calls: CallLog, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls `run` with `model`, its adapted weights traced; creates missing adapters first."""
        if not self.weights:
            return self._run_keeping_params(run, *args, **kwargs)
        params = traverse_util.flatten_dict(self.variables.get("params", {}))
        absent = weights_without_adapter(self.weights, params)
        if absent and self.is_mutable_collection("params"):
            # If all adapters are fresh and lora_b is zero, the model computes what the base does.
            are_fresh = len(absent) == len(self.weights) and not any(
                (one.rule and one.rule.lora_b_init) or adapter_paths(one)["lora_b"] in params
                for one in self.weights
            )
            result, has_weights = None, {*map(weight_path, absent)} <= params.keys()
            lacks_magnitudes = any(adapter_paths(one)["lora_b"] in params for one in absent)
            if are_fresh or lacks_magnitudes or not has_weights:
                # A call of the base creates the parameters and what its layers' adapters lack, and
                # updates the other collections.
                result = self._run_keeping_params(run, *args, **kwargs)
            params, created = traverse_util.flatten_dict(self.variables["params"]), {}
            for weight in absent:
                created |= create_params(weight, params, self.make_rng("params"))
            for name, value in traverse_util.unflatten_dict(created).items():
                self.put_variable("params", name, value)
            if are_fresh:
                return result
            params = traverse_util.flatten_dict(self.variables["params"])
            absent = weights_without_adapter(self.weights, params)
        if absent:
            raise ValueError(
                "params has no adapter for some weights; expected one for each: create them by "
                'init, or by apply(…, rngs={"params": key}, mutable=["params"]). The weights are:'
                f"{listing([weight.path for weight in absent])}"
            )
        drops = not self.deterministic and any(
            one.rule and one.rule.dropout for one in self.weights
        )
        key = self.make_rng("dropout") if drops else None
        calls.traces_weights = True
        with weight_trace() as trace:
            trace_params = functools.partial(trace_adapted_params, self.weights, trace, key)
            run_traced = nn.map_variables(run, "params", trans_in_fn=trace_params)
            return jax.tree.map(trace.array, run_traced(self.bound.module, *args, **kwargs))

    @nn.nowrap
    def _run_keeping_params(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `run` with `model`. If the call may create adapters, existing parameters are
        restored afterwards, because `nn.map_variables` writes them back as it has changed them."""
        if not self.is_mutable_collection("params"):
            return run(self.bound.module, *args, **kwargs)
        before = traverse_util.flatten_dict(self.variables.get("params", {}))
        result = run(self.bound.module, *args, **kwargs)
        after = traverse_util.flatten_dict(self.variables.get("params", {}))
        if self.weights or after.keys() > before.keys():
            for name, value in traverse_util.unflatten_dict(before).items():
                self.put_variable("params", name, value)
        return result


class _Interceptor:
    """Adapts the layers that a model calls, and logs them in `calls`; the function for
    `nn.intercept_methods`. `writers` are the class names of the modules around the current call
    that compute the parameters of other modules."""

    def __init__(self, adapted: DoRA, calls: CallLog) -> None:
        self.adapted, self.calls = adapted, calls
        self.writers: list[str] = []

    def __call__(self, next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        is_writer = isinstance(context.module, _PARAMETER_WRITERS)
        if is_writer:
            self.writers.append(type(context.module).__name__)
        try:
            result = self._call(next_fun, args, kwargs, context)
        finally:
            if is_writer:
                self.writers.pop()
        check_own_names(context.module)
        return result

    def _call(self, next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a method, or the DoRA layer instead if a rule matches the layer."""
        module, path = context.module, "/".join(context.module.path)
        kind = dora_class_of(module)
        is_other_method = kind is not None and context.method_name not in _METHODS
        if is_other_method or isinstance(module, DoRA) or context.method_name == "setup":
            return next_fun(*args, **kwargs)
        weights = self.adapted.weights
        owners = ("/".join((*self.adapted.path, *weight_path(one)[:-1])) for one in weights)
        if path in owners:  # The module's weights are traced, so its own code runs.
            return next_fun(*args, **kwargs)
        is_linear = kind is not None and kind.is_linear(module) and not self.writers
        is_linear = is_linear and path not in self.adapted.left_out
        rules = self.adapted.rules
        rule = next((rule for rule in rules if rule.matches(path, linear=is_linear)), None)
        if rule is not None and kind is not None:
            self._check(path, rule, is_linear)
            self.calls.linear[path] = is_linear
            return self._call_adapted(kind, rule, next_fun, args, kwargs, context)
        result = next_fun(*args, **kwargs)
        if holds_parameters(module):
            # A layer inside the module may share its scope.
            self.calls.linear[path] = is_linear or self.calls.linear.get(path, False)
            # The path may also belong to an adapted layer that shares the module's scope.
            if rule is not None and path not in self.calls.adapted:
                names = ", ".join(layer.__name__ for layer in COUNTERPARTS)
                raise TypeError(
                    f"rule {rule.path!r} matches a module that cannot be adapted; expected "
                    f"{names}: pass inputs for the model as example= of apply_dora, or narrow the "
                    "rule's path so that it does not match:"
                    f"{listing([f'{path} ({type(module).__name__})'])}"
                )
        return result

    def _check(self, path: str, rule: DoRARule, is_linear: bool) -> None:
        """Raises if the layer cannot have an adapter here."""
        inner = self.adapted.model
        if isinstance(inner, DoRA) and inner.matches(path, is_linear):
            raise ValueError(
                f"rule {rule.path!r} matches {path!r}, which has an adapter already; expected a "
                "layer without one: narrow the rule's path, or adapt the base model, which is the "
                "attribute `model`, by all rules at once"
            )
        if self.writers:
            raise TypeError(
                f"rule {rule.path!r} matches a layer whose parameters nn.{self.writers[-1]} "
                "computes in every call; expected a layer with stored parameters: narrow the "
                f"rule's path so that it does not match {path!r}"
            )

    def _call_adapted(
        self,
        kind: Any,
        rule: DoRARule,
        next_fun: Callable[..., Any],
        args: Any,
        kwargs: Any,
        context: Any,
    ) -> Any:
        """Calls the DoRA layer of class `kind` instead of a linen layer."""
        module, path = context.module, "/".join(context.module.path)
        if not module.has_variable("params", kind.kernel_name):
            next_fun(*args, **kwargs)
        signature = inspect.signature(context.orig_method)
        (_, inputs), *others = signature.bind(*args, **kwargs).arguments.items()
        kernel = module.get_variable("params", kind.kernel_name)
        if has_computed_params(module, max(len(self.adapted.path), self.calls.traces_weights)):
            self.calls.computed.add(path)
            is_there = module.has_variable("params", "lora_a")
            if not self.adapted.is_initializing() and not is_there:
                raise NotImplementedError(
                    f"rule {rule.path!r} matches a layer whose parameters nn.map_variables "
                    "computes, for which apply creates no adapter; expected an adapter in params: "
                    f"create it by init, or narrow the path so that it does not match {path!r}"
                )
        with named_in_errors(path, "adapted"):
            base = counterpart(module, inputs, kernel, **dict(others))
            layer: Any = dora_layer(module, kind, base, rule, kernel)
        self.calls.adapted[path] = (kind.kernel_name, Setting.of(layer), stack_axes(module))
        if context.method_name == "attend":
            return layer.attend(inputs)
        if layer.dropout is None:
            return layer(inputs)
        key = None if self.adapted.deterministic else module.make_rng("dropout")
        return layer(inputs, deterministic=self.adapted.deterministic, rngs=key)
