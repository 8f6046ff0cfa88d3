"""Finds, in one abstract call of a linen model, what reads each parameter."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx, traverse_util

from jax_dora.adapt.find_sites import find_sites
from jax_dora.adapt.site import Site
from jax_dora.linen.layer import dora_class_of
from jax_dora.linen.params import params_path
from jax_dora.weights.read_log import Example, ReadLog, split_arrays
from jax_dora.weights.trace import weight_trace

_RECORDS = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class HiddenModule:
    """Hides a module from the one that holds it: Flax would make it a part with a name, and put
    that name before its paths."""

    module: nn.Module

    def within(self, scope: Any) -> "HiddenModule":
        """Returns the module bound to `scope`, held alike."""
        return HiddenModule(self.module.copy(parent=scope))


class _Observed(nn.Module):
    """Calls a model, and notes which module's methods run where."""

    held: HiddenModule
    record: int

    def setup(self) -> None:
        self.bound = self.held.within(self.scope)

    def __call__(self, note: Callable[..., Any], example: Example) -> Any:
        scope: Any = self.scope
        # What nn.jit has traced for another record would name the scopes of that.
        scope.flags = {**scope.flags, "jax_dora": self.record}
        with nn.intercept_methods(note), jax.named_scope("dora[0]"):
            return example.call(self.bound.module)


def find_linen_sites(model: nn.Module, example: Example) -> list[Site]:
    """Returns every parameter of two axes or more of a linen model, and every other module that
    holds parameters, in the order of their paths; those of layers that have a counterpart in
    `jax_dora.layers` are `is_layer`.

    Raises:
      Whatever the call raises.
    """
    arrays, rebuild = split_arrays(example)
    observed = _Observed(HiddenModule(model), next(_RECORDS))
    modules: dict[str, nn.Module] = {"": model}

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, path = context.module, "/".join(context.module.path)
        if context.method_name == "setup" or isinstance(module, _Observed):
            return next_fun(*args, **kwargs)
        if path not in modules or dora_class_of(module):  # rather than one that shares its scope
            modules[path] = module
        with jax.named_scope(f"dora[{list(modules).index(path)}]"):
            return next_fun(*args, **kwargs)

    def made(arrays: Any) -> Any:
        rngs = {"params": jax.random.key(0)}
        return observed.init(rngs, note, rebuild(arrays))

    variables = jax.eval_shape(made, arrays)
    flat = traverse_util.flatten_dict(variables.get("params", {}))
    weights = {path: leaf for path, leaf in flat.items() if nn.unbox(leaf).ndim > 1}
    log = ReadLog(map(params_path, weights), modules)

    def run(variables: Any, arrays: Any) -> None:
        params = traverse_util.flatten_dict(variables.get("params", {}))
        with weight_trace() as trace:
            for path in weights:
                value = log.traced(trace, params_path(path), nn.unbox(params[path]))
                params[path] = nn.meta.replace_boxed(params[path], value)
            given = {**variables, "params": traverse_util.unflatten_dict(params)}
            result, _ = observed.apply(
                given,
                note,
                rebuild(arrays),
                rngs={"params": jax.random.key(0)},
                mutable=[name for name in given if name != "params"],
            )
        log.record_result(result)

    jax.eval_shape(run, variables, arrays)
    # A stack's layers have adapters of their own, as experts have.
    log.reads = {
        key: tuple(dataclasses.replace(one, axes=one.axes.replace("s", "b")) for one in found)
        for key, found in log.reads.items()
    }
    found = find_sites(_mirror(flat, {path: type(one) for path, one in modules.items()}), log)
    for site in found:
        path = site.found.paths[0]
        module: Any = modules.get(path)
        cls = dora_class_of(module)
        if cls is None:
            continue
        if site.param != cls.kernel_name:
            site.is_matched = not site.refusal  # a stacked bias is none of the layer's weights
            continue
        of_site = log.reads[path, site.param]
        if of_site and all(path in read.scopes for read in of_site):
            site.is_layer, site.refusal, site.how = True, "", f"linen.{type(module).__name__}"
            site.is_linear = cls.is_linear(module) and site.is_linear
    return found


def lora_a_path(site: Site) -> tuple[str, ...]:
    """Returns where in params an adapted weight's lora_a lies."""
    path = site.found.paths[0]
    is_plain = site.is_layer or site.param == "kernel"
    name = "lora_a" if is_plain else f"{site.param}_lora_a"
    return (*(path.split("/") if path else ()), name)


class _Params(nnx.Module):
    """Parameters of a linen module, and of those in it."""


def _mirror(flat: Mapping[tuple[str, ...], Any], classes: Mapping[str, type[Any]]) -> Any:
    """Returns an nnx module with the parameters of a linen model."""
    made: dict[tuple[str, ...], Any] = {}

    def module(path: tuple[str, ...]) -> Any:
        if path not in made:
            kind = classes.get("/".join(path), _Params)
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            made[path] = type(kind.__name__, (_Params,), names)()
            if path:
                setattr(module(path[:-1]), path[-1], made[path])
        return made[path]

    root = module(())
    for path, leaf in flat.items():
        setattr(module(path[:-1]), path[-1], nnx.Param(nn.unbox(leaf)))
    return root
