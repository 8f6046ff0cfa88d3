"""The linen module that calls another one with adapters."""

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
from jax_dora.layers.rule import DoRARule
from jax_dora.linen.calls import Calls, holds_parameters, is_computed, stack_axes
from jax_dora.linen.layer import COUNTERPARTS, counterpart, dora_class_of, dora_layer
from jax_dora.linen.params import adapted_modules
from jax_dora.linen.reads import Held
from jax_dora.linen.weights import LinenWeight, followed, missing
from jax_dora.weights.trace import weight_trace

_METHODS = ("__call__", "attend")
# They call a layer with parameters that they have computed from the layer's.
_WRITERS = (nn.WeightNorm, nn.SpectralNorm)


class DoRA(nn.Module):
    """Computes the function of `model` with adapters; `apply_dora` returns it.

    Attributes:
      held: the module without adapters.
      rules: which layers have which adapter.
      deterministic: True turns dropout off.
      weights: the parameters that are adapted where products read them.
      left_out: the paths of the layers that "all-linear" leaves out, besides those whose class or
        name says so.
    """

    held: Held
    rules: tuple[DoRARule, ...]
    deterministic: bool = True
    weights: tuple[LinenWeight, ...] = ()
    left_out: tuple[str, ...] = ()

    def setup(self) -> None:
        self.bound = self.held.within(self.scope)

    @property
    def model(self) -> nn.Module:
        """Returns the module without adapters, unbound."""
        return self.held.module

    @nn.nowrap
    def matches(self, path: str, is_linear: bool) -> bool:
        """Returns whether a rule of this model, or of one that it is made of, takes the layer."""
        inner = self.model
        is_inner = isinstance(inner, DoRA) and inner.matches(path, is_linear)
        return is_inner or any(rule.matches(path, linear=is_linear) for rule in self.rules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `model` with its adapters."""
        return self.noting(Calls(), None, *args, **kwargs)

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Does what `nn.Module.apply` does; `method` is one of `model`'s."""
        return super().apply(variables, *args, method=self._routed(method), **kwargs)

    @nn.nowrap
    def init_with_output(self, rngs: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Does what `nn.Module.init_with_output` does; `method` is one of `model`'s."""
        return super().init_with_output(rngs, *args, method=self._routed(method), **kwargs)

    @nn.nowrap
    def _routed(self, method: Any) -> Any:
        if method is None or (isinstance(method, str) and hasattr(type(self), method)):
            return method

        def run(adapted: DoRA, *args: Any, **kwargs: Any) -> Any:
            return adapted.noting(Calls(), method, *args, **kwargs)

        return run

    def noting(self, calls: Calls, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of `model`, `__call__` if None, and adds what it called to `calls`."""
        scope: Any = self.scope
        # What nn.jit has traced under other rules, or noted elsewhere, is no trace of this call.
        key = hash((self.rules, self.deterministic, self.weights, self.left_out, calls.token))
        scope.flags = freeze({**scope.flags, "jax_dora": key})

        def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if callable(method):
                return method(model, *args, **kwargs)
            return getattr(model, method or "__call__")(*args, **kwargs)

        with nn.intercept_methods(_Interceptor(self, calls)):
            result = self._following(calls, run, *args, **kwargs)
        linear = dict.fromkeys(adapted_modules(self.variables.get("params", {})), True)
        linear |= calls.linear
        names = {(path,): is_linear for path, is_linear in linear.items()}
        names |= {one.names: one.is_linear for one in self.weights}
        paths = sorted(names)
        assign(self.rules, paths, [names[path] for path in paths])
        return result

    @nn.nowrap
    def _following(self, calls: Calls, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `run` with `model`, whose adapted weights are followed."""
        if not self.weights:
            return self._making(run, *args, **kwargs)
        params = traverse_util.flatten_dict(self.variables.get("params", {}))
        absent = missing(self.weights, params)
        if absent and self.is_mutable_collection("params"):
            # Fresh adapters compute what the base does, where there are no others.
            are_fresh = len(absent) == len(self.weights)
            are_fresh = are_fresh and not any(one.spec.rule.lora_b_init for one in self.weights)
            result = None
            if are_fresh or not params.keys() >= {one.path for one in absent}:
                # A pass of the base makes the parameters, and other collections as a call does.
                result = self._making(run, *args, **kwargs)
            params, made = traverse_util.flatten_dict(self.variables["params"]), {}
            for one in absent:
                made |= one.make(params, self.make_rng("params"))
            for name, value in traverse_util.unflatten_dict(made).items():
                self.put_variable("params", name, value)
            if are_fresh:
                return result
            params = traverse_util.flatten_dict(self.variables["params"])
            absent = missing(self.weights, params)
        if absent:
            raise ValueError(
                "params has no adapter for some weights; expected them there: make them with init, "
                'or with apply(…, rngs={"params": key}, mutable=["params"]):'
                f"{listing([one.names[0] for one in absent])}"
            )
        drops = not self.deterministic and any(one.spec.rule.dropout for one in self.weights)
        key = self.make_rng("dropout") if drops else None
        calls.is_following = True
        with weight_trace() as trace:
            given = functools.partial(followed, self.weights, trace, key)
            following = nn.map_variables(run, "params", trans_in_fn=given)
            return jax.tree.map(trace.array, following(self.bound.module, *args, **kwargs))

    @nn.nowrap
    def _making(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `run` with `model`; where that is to make adapters, the parameters that are there
        stay as they are: `nn.map_variables` writes them as it has changed them."""
        if not self.is_mutable_collection("params"):
            return run(self.bound.module, *args, **kwargs)
        given = traverse_util.flatten_dict(self.variables.get("params", {}))
        result = run(self.bound.module, *args, **kwargs)
        params = traverse_util.flatten_dict(self.variables.get("params", {}))
        if self.weights or params.keys() > given.keys():
            for name, value in traverse_util.unflatten_dict(given).items():
                self.put_variable("params", name, value)
        return result


class _Interceptor:
    """Adapts the layers that a model calls; a function for `nn.intercept_methods`.

    Attributes:
      adapted: the model with adapters.
      calls: notes what is called.
      writers: the classes of the modules around a call that compute the parameters of others.
    """

    def __init__(self, adapted: DoRA, calls: Calls) -> None:
        self.adapted, self.calls = adapted, calls
        self.writers: list[str] = []

    def __call__(self, next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if not isinstance(context.module, _WRITERS):
            return self._call(next_fun, args, kwargs, context)
        self.writers.append(type(context.module).__name__)
        try:
            return self._call(next_fun, args, kwargs, context)
        finally:
            self.writers.pop()

    def _call(self, next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a method as it is, or the DoRA layer in its place where a rule matches it."""
        module, path = context.module, "/".join(context.module.path)
        kind = dora_class_of(module)
        is_other = kind is not None and context.method_name not in _METHODS
        if is_other or isinstance(module, DoRA) or context.method_name == "setup":
            return next_fun(*args, **kwargs)
        weights = self.adapted.weights
        owners = ("/".join((*self.adapted.path, *one.path[:-1])) for one in weights)
        if path in owners:  # its weights are adapted where products read them
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
            # A layer within it may share its scope.
            self.calls.linear[path] = is_linear or self.calls.linear.get(path, False)
            if rule is not None and path not in self.calls.adapted:  # a layer that shares its scope
                names = ", ".join(one.__name__ for one in COUNTERPARTS)
                raise TypeError(
                    f"rule {rule.path!r} matches a module that cannot be adapted; expected "
                    f"{names}, or example=, inputs to call the model with, in apply_dora: or "
                    "narrow the rule's path so that it leaves out:"
                    f"{listing([f'{path} ({type(module).__name__})'])}"
                )
        return result

    def _check(self, path: str, rule: DoRARule, is_linear: bool) -> None:
        """Raises unless the layer can have an adapter here."""
        inner = self.adapted.model
        if isinstance(inner, DoRA) and inner.matches(path, is_linear):
            raise ValueError(
                f"rule {rule.path!r} matches {path!r}, which holds an adapter already; "
                "expected a layer without one: narrow the rule's path, or adapt the "
                "model's own model, its attribute `model`, by all rules at once"
            )
        if self.writers:
            raise TypeError(
                f"rule {rule.path!r} matches a layer whose parameters nn.{self.writers[-1]} "
                "computes in every call; narrow the rule's path so that it leaves out "
                f"{path!r}"
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
        """Calls the DoRA layer of class `kind` in a layer's place."""
        module, path = context.module, "/".join(context.module.path)
        if not module.has_variable("params", kind.kernel_name):
            next_fun(*args, **kwargs)
        signature = inspect.signature(context.orig_method)
        (_, inputs), *others = signature.bind(*args, **kwargs).arguments.items()
        kernel = module.get_variable("params", kind.kernel_name)
        if is_computed(module, max(len(self.adapted.path), self.calls.is_following)):
            self.calls.computed.add(path)
            is_there = module.has_variable("params", "lora_a")
            if not self.adapted.is_initializing() and not is_there:
                raise NotImplementedError(
                    f"rule {rule.path!r} matches a layer whose parameters nn.map_variables "
                    "computes, beside which apply makes no adapter; expected one in "
                    "params, as init makes it, or a narrower path that leaves out "
                    f"{path!r}"
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
