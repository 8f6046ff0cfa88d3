"""Lists the weights of a linen model as `AdaptableWeight`s.

One abstract call of the model finds the operations that read each weight.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx, traverse_util

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import OUTPUT_HEADS
from jax_dora.adapt.inventory import described_by_reads, mark_experts_and_heads
from jax_dora.adapt.reads import mark_mapped_axes
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers.stack import without_stack_axes
from jax_dora.linen.layer import dora_class_of
from jax_dora.linen.params import params_path
from jax_dora.tracing.read_log import Example, ReadLog, split_arrays
from jax_dora.tracing.trace import weight_trace

_CALL_NUMBERS = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class HiddenModule:
    """Hides a module from the module that has it as an attribute. Flax would make it a submodule
    and prefix its paths with the attribute's name."""

    module: nn.Module

    def within(self, scope: Any) -> "HiddenModule":
        """Returns the module bound to `scope`, hidden as well."""
        return HiddenModule(self.module.copy(parent=scope))


def find_linen_weights(
    model: nn.Module, example: Example
) -> tuple[list[AdaptableWeight], Mapping[tuple[str, ...], Any]]:
    """Returns every parameter of two axes or more of a linen model, and every other module that
    holds parameters, in the order of their paths; and all leaves of params by their paths. The
    kernel of a layer with a counterpart in `jax_dora.layers` has `is_layer`. Raises any error of
    the call."""
    arrays, rebuild = split_arrays(example)
    number = next(_CALL_NUMBERS)
    modules: dict[str, nn.Module] = {"": model}
    log: Any = None

    def interceptor(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, path = context.module, "/".join(context.module.path)
        if context.method_name == "setup":
            return next_fun(*args, **kwargs)
        # Several modules may share a scope; prefer the layer that a DoRA class adapts.
        if path not in modules or dora_class_of(module):
            modules[path] = module
        for name, value in module.variables.get("params", {}).items() if log else ():
            if not isinstance(value, Mapping):
                log.record_shape(list(modules).index(path), name, nn.unbox(value).shape)
        with jax.named_scope(f"dora[{list(modules).index(path)}]"):
            return next_fun(*args, **kwargs)

    def observe(bound: Any, example: Example) -> Any:
        # The flag is part of nn.jit's cache key. A cached trace of another call would have the
        # scope names of that call.
        bound.scope.flags = {**bound.scope.flags, "jax_dora": number}
        with nn.intercept_methods(interceptor), jax.named_scope("dora[0]"):
            return example.call(bound)

    rngs = {"params": jax.random.key(0)}
    variables = jax.eval_shape(lambda a: nn.init(observe, model)(rngs, rebuild(a)), arrays)
    flat = traverse_util.flatten_dict(variables.get("params", {}))
    weights = {path: leaf for path, leaf in flat.items() if nn.unbox(leaf).ndim > 1}
    log = ReadLog(map(params_path, weights), modules)

    def run(variables: Any, arrays: Any) -> None:
        params = traverse_util.flatten_dict(variables.get("params", {}))
        with weight_trace() as trace:
            for path in weights:
                value = log.traced(trace, params_path(path), nn.unbox(params[path]))
                params[path] = nn.meta.replace_boxed(params[path], value)
            traced = {**variables, "params": traverse_util.unflatten_dict(params)}
            mutable = [name for name in traced if name != "params"]
            apply = nn.apply(observe, model, mutable=mutable)
            result, _ = apply(traced, rebuild(arrays), rngs=rngs)
        log.record_result(result)

    log.run(run, variables, arrays, example)
    shapes = {params_path(path): nn.unbox(leaf).shape for path, leaf in weights.items()}
    mark_mapped_axes(log, shapes)
    # A stack axis is a batch axis here: each layer has its own adapter.
    for key, reads in log.reads.items():
        log.reads[key] = tuple(
            dataclasses.replace(read, axes=without_stack_axes(read.axes, "b")) for read in reads
        )
    params: dict[str, dict[str, Any]] = {}
    for path, leaf in flat.items():
        owner, name = params_path(path)
        params.setdefault(owner, {})[name] = nnx.Param(nn.unbox(leaf))
        # A parameter may be a dict, whose module is the one that holds the dict.
        above = next(one for one in _paths_above(owner) if one in modules)
        modules.setdefault(owner, modules[above])
    found = []
    for path in sorted(params, key=lambda path: path.split("/")):
        one = AdaptableWeight((path,), (path,), "", modules=modules)
        found += _weights_of_module(one, params[path], log)
    mark_experts_and_heads(found, log)
    return [_as_layer(one, log) for one in found], flat


def _paths_above(path: str) -> Iterator[str]:
    """Yields a path and those of the modules around it, innermost first."""
    parts = path.split("/") if path else []
    for length in range(len(parts), -1, -1):
        yield "/".join(parts[:length])


def _weights_of_module(
    one: AdaptableWeight, params: Mapping[str, nnx.Param], log: ReadLog
) -> list[AdaptableWeight]:
    """Returns the weights of one module, which `one` is without weights, among its `params`; or the
    module itself if it has parameters but no weights."""
    weights = []
    for param, variable in params.items():
        if variable.ndim > 1:
            own = params_path_of(one, param)
            weight = one.replace(
                paths=("/".join(own), one.path),
                param=param,
                shape=variable.shape,
                variable=variable,
            )
            weight = described_by_reads(weight, None, log.reads[one.path, param])
            weights.append(weight)
    if len(weights) == 1 and one.path:
        weights = [weight.replace(paths=one.paths) for weight in weights]
    weights = [
        weight.replace(is_linear=False)
        if weight.path.rpartition("/")[2] in OUTPUT_HEADS
        else weight
        for weight in weights
    ]
    return weights or [one.replace(refusal="it has no weight of two axes")]


def _as_layer(weight: AdaptableWeight, log: ReadLog) -> AdaptableWeight:
    """Returns a weight with `is_layer` if only its module's own call reads it and a DoRA class
    adapts the module."""
    module: Any = weight.modules.get(weight.module_paths[0])
    cls = dora_class_of(module)
    if cls is None:
        return weight
    if weight.param != cls.kernel_name:
        # Rules do not match a stacked bias.
        return weight.replace(is_matched=not weight.refusal)
    path = weight.module_paths[0]
    reads = log.reads[path, weight.param]
    if not reads or not all(path in read.scopes for read in reads):
        return weight
    return weight.replace(
        is_layer=True,
        is_linear=cls.is_linear(module) and weight.is_linear,
        refusal="",
        how=f"linen.{type(module).__name__}",
    )


def params_path_of(weight: AdaptableWeight, name: str) -> tuple[str, ...]:
    """Returns the path in params of the parameter `name` of a weight's module."""
    return (*filter(None, weight.module_paths[0].split("/")), name)


def adapter_paths(weight: AdaptableWeight) -> dict[str, tuple[str, ...]]:
    """Returns the path in params of each array of a weight's adapter."""
    return {name: params_path_of(weight, weight.attribute(name)) for name in ADAPTER_NAMES}
