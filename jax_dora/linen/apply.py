"""Adapters into an existing Flax linen model, as a transform of the module."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax import traverse_util
from flax.core import freeze

from dora_common.rules import as_rules, assign, listing
from jax_dora.adapt.coverage import logged
from jax_dora.adapt.merge import Setting
from jax_dora.adapt.site import assigned, refuse
from jax_dora.adapt.tree import named_in_errors
from jax_dora.layers.rule import DoRARule, Rules
from jax_dora.linen.calls import (
    Calls,
    holds_parameters,
    is_computed,
    stack_axes,
)
from jax_dora.linen.layer import COUNTERPARTS, counterpart, dora_class_of, dora_layer
from jax_dora.linen.params import adapted_modules
from jax_dora.linen.reads import Held, linen_sites
from jax_dora.linen.weights import LinenWeight, followed, missing
from jax_dora.weights.reads import Example
from jax_dora.weights.trace import weight_trace

_METHODS = ("__call__", "attend")
# What calls a layer with parameters that it has computed from the layer's.
_WRITERS = (nn.WeightNorm, nn.SpectralNorm)


def apply_dora(
    model: nn.Module, rules: Rules, *, deterministic: bool | None = None, example: Any = None
) -> "DoRA":
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
        return DoRA(Held(model), found, bool(deterministic))
    weights = _assigned(model, found, Example.of(example))
    return DoRA(Held(model), found, bool(deterministic), *weights)


def _assigned(
    model: nn.Module, rules: tuple[DoRARule, ...], example: Example
) -> tuple[tuple[LinenWeight, ...], tuple[str, ...]]:
    """Returns the parameters that rules adapt where products read them, and the paths of the layers
    that "all-linear" leaves out."""
    found = [site for site in linen_sites(model, example) if site.is_matched]
    matched = assigned(found, rules)
    refuse(
        [site for site, _ in matched if site.refusal],
        TypeError,
        "the rules match what cannot be adapted; narrow the rules' paths so that they leave out",
    )
    for site, _ in matched:
        site.is_adapted = True
    logged(found)
    weights = tuple(LinenWeight.of(site, rule) for site, rule in matched if not site.is_layer)
    left_out = (site.names[0] for site in found if site.is_layer and not site.is_linear)
    return weights, tuple(left_out)


class DoRA(nn.Module):
    """Computes what `model` does, with adapters: what `apply_dora` returns.

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

        with nn.intercept_methods(self._interceptor(calls)):
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

    def _interceptor(self, calls: Calls) -> Callable[..., Any]:
        """Adapts the layers that are called."""
        writers: list[str] = []

        def intercept(next_fun, args, kwargs, context):
            if not isinstance(context.module, _WRITERS):
                return adapt(next_fun, args, kwargs, context)
            writers.append(type(context.module).__name__)
            try:
                return adapt(next_fun, args, kwargs, context)
            finally:
                writers.pop()

        def adapt(next_fun, args, kwargs, context):
            module, path = context.module, "/".join(context.module.path)
            cls = dora_class_of(module)
            is_other = cls is not None and context.method_name not in _METHODS
            if is_other or isinstance(module, DoRA) or context.method_name == "setup":
                return next_fun(*args, **kwargs)
            is_linear = cls is not None and cls.is_linear(module) and path not in self.left_out
            is_linear = is_linear and not writers
            owners = ("/".join((*self.path, *one.path[:-1])) for one in self.weights)
            if path in owners:  # its weights are adapted where products read them
                return next_fun(*args, **kwargs)
            matching = (rule for rule in self.rules if rule.matches(path, linear=is_linear))
            rule = next(matching, None)
            if rule is not None and cls is not None:
                inner = self.model
                if isinstance(inner, DoRA) and inner.matches(path, is_linear):
                    raise ValueError(
                        f"rule {rule.path!r} matches {path!r}, which holds an adapter already; "
                        "expected a layer without one: narrow the rule's path, or adapt the "
                        "model's own model, its attribute `model`, by all rules at once"
                    )
                if writers:
                    raise TypeError(
                        f"rule {rule.path!r} matches a layer whose parameters nn.{writers[-1]} "
                        "computes in every call; narrow the rule's path so that it leaves out "
                        f"{path!r}"
                    )
                calls.linear[path] = is_linear
                if not module.has_variable("params", cls.kernel_name):
                    next_fun(*args, **kwargs)
                signature = inspect.signature(context.orig_method)
                (_, inputs), *others = signature.bind(*args, **kwargs).arguments.items()
                kernel = module.get_variable("params", cls.kernel_name)
                if is_computed(module, max(len(self.path), calls.is_following)):
                    calls.computed.add(path)
                    if not self.is_initializing() and not module.has_variable("params", "lora_a"):
                        raise NotImplementedError(
                            f"rule {rule.path!r} matches a layer whose parameters nn.map_variables "
                            "computes, beside which apply makes no adapter; expected one in "
                            "params, as init makes it, or a narrower path that leaves out "
                            f"{path!r}"
                        )
                with named_in_errors(path, "adapted"):
                    base = counterpart(module, inputs, kernel, **dict(others))
                    layer = dora_layer(module, cls, base, rule, kernel)
                calls.adapted[path] = (cls.kernel_name, Setting.of(layer), stack_axes(module))
                return self._result(layer, context, inputs)
            result = next_fun(*args, **kwargs)
            if holds_parameters(module):
                calls.linear[path] = is_linear
                if rule is not None and path not in calls.adapted:  # a layer that shares its scope
                    names = ", ".join(one.__name__ for one in COUNTERPARTS)
                    raise TypeError(
                        f"rule {rule.path!r} matches a module that cannot be adapted; expected "
                        f"{names}, or example=, inputs to call the model with, in apply_dora: or "
                        "narrow the rule's path so that it leaves out:"
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
