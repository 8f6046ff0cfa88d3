"""Modules whose own code reads adapted weights: a subclass of each one's class, made when it is
needed, whose methods run as the class wrote them while the weights are followed."""

import contextlib
import copyreg
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
from flax import nnx

from jax_dora.layers.base_layer import is_node
from jax_dora.weights.adapter import ATTRIBUTES, AdapterSpec, WeightAdapter
from jax_dora.weights.trace import is_followed, weight_trace


def has_dora_type(module: Any) -> bool:
    """Returns whether a module has a class that `dora_type` has made."""
    cls = type(module)
    return vars(cls).get("plain_type") is cls.__base__


@functools.cache
def dora_type(base: type[nnx.Module]) -> type[Any]:
    """Returns the subclass of `base` whose methods and properties follow adapted weights.

    Attributes:
      plain_type: of the class, `base`.
      dora_specs: those of the adapted weights that the module owns.
      dora_reads: the adapted weights that its methods read: the path from it to the owner, and the
        parameter's name.
    """
    methods = {name: _following(method) for name, method in own_methods(base).items()}
    methods |= {
        name: property(_following(one.fget), one.fset, one.fdel, one.__doc__)
        for name, one in inspect.getmembers(base, lambda one: isinstance(one, property))
        if one.fget is not None and not name.startswith(_OF_OTHERS)
    }
    if issubclass(base, nnx.Dict):
        methods["__iter__"] = _own_keys
    return _metaclass(type(base))(
        f"DoRA{base.__name__}",
        (base,),
        {"plain_type": base, "__module__": base.__module__, **methods},
    )


def _own_keys(self: Any) -> Iterator[str]:
    """Yields the keys of an `nnx.Dict`, without those of its adapters."""
    added = {spec.attribute(name) for spec in self.dora_specs for name in ATTRIBUTES}
    added |= {"dora_specs", "dora_reads"}
    return (key for key in self.plain_type.__iter__(self) if key not in added)


@functools.cache
def _metaclass(kind: type[type]) -> Any:
    """Returns a metaclass by which pickle finds the classes again that `dora_type` makes."""
    made = type(f"DoRA{kind.__name__}", (kind,), {})
    copyreg.pickle(made, lambda cls: (dora_type, (cast(Any, cls).plain_type,)))
    return made


# What Python, JAX's pytrees and Flax's graphs call.
_OF_OTHERS = ("__", "_pytree_", "_graph_node_")


def own_methods(module_type: type[Any]) -> dict[str, Any]:
    """Returns `__call__` and the other methods that a class, or a base of it, wrote itself."""
    found: dict[str, Any] = {}
    of_flax = set(nnx.Module.__mro__)
    for one in module_type.__mro__:
        if one in of_flax:
            continue
        for name, value in vars(one).items():
            if name in found or (name.startswith(_OF_OTHERS) and name != "__call__"):
                continue
            if inspect.isgeneratorfunction(value) or isinstance(value, type | property):
                continue
            if callable(value) and hasattr(type(value), "__get__"):
                found[name] = value
    return {
        name: value
        for name, value in found.items()
        if not isinstance(value, staticmethod | classmethod)
    }


def _following(method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        with followed(self) as plain:
            return plain(bound(*args, **kwargs))

    return call


@contextlib.contextmanager
def followed(module: Any) -> Iterator[Callable[[Any], Any]]:
    """Follows the adapted weights that the methods of `module` read, its own among them even where
    the methods of another read them too. Gives what takes a result to one without followed
    weights.

    Meanwhile the adapter's attribute holds a variable of its own: other attributes may hold the
    same parameter, and this adapter is not theirs."""
    own = (((), spec.param) for spec in module.dora_specs)
    adapters = [
        one
        for path, param in dict.fromkeys((*module.dora_reads, *own))
        for one in adapters_of(at_path(module, path))
        if one.spec.param == param and not is_followed(one.kernel_param.get_raw_value())
    ]
    if not adapters:
        yield lambda result: result
        return
    variables = [one.kernel_param for one in adapters]
    followed_variables = []
    with weight_trace() as trace:
        for one, variable in zip(adapters, variables, strict=True):
            value: Any = one.followed(trace, variable.get_raw_value())
            own_variable = type(variable).from_metadata(value, variable.get_metadata())
            followed_variables.append(own_variable)
            vars(one.module)[one.spec.param] = own_variable

        def plain(result: Any) -> Any:
            leaves = jax.tree.leaves(result, is_leaf=is_node)
            if not any(map(is_followed, leaves)):
                return result
            return jax.tree.map(trace.array, result, is_leaf=is_node)

        try:
            yield plain
        finally:
            trios = zip(adapters, variables, followed_variables, strict=True)
            for one, variable, own_variable in trios:
                if one.kernel_param is own_variable:
                    vars(one.module)[one.spec.param] = variable


def at_path(module: Any, path: tuple[str, ...]) -> Any:
    """Returns the attribute at `path` in a module."""
    for key in path:
        if isinstance(module, list | tuple):
            module = module[int(key)]
        elif isinstance(module, dict):
            module = module[key] if key in module else module[int(key)]
        else:
            module = getattr(module, key)
    return module


def adapters_of(module: Any) -> list[WeightAdapter]:
    """Returns the adapted weights that `module` owns, without that of a `DoRALayer`."""
    if not has_dora_type(module):
        return []
    return [WeightAdapter(module, spec) for spec in module.dora_specs]


def as_dora(module: Any) -> None:
    """Gives `module`, in place, the class whose methods follow adapted weights."""
    if not has_dora_type(module):
        module.dora_specs, module.dora_reads = (), ()
        module.__class__ = dora_type(type(module))


def add_adapter(
    module: Any, spec: AdapterSpec, reader: Any, path: tuple[str, ...]
) -> WeightAdapter:
    """Returns a new adapter of a weight of `module`, which has no arrays yet.

    Args:
      reader: the module whose methods read the weight.
      path: from there to `module`.
    """
    as_dora(module)
    as_dora(reader)
    module.dora_specs = (*module.dora_specs, spec)
    reader.dora_reads = (*reader.dora_reads, (path, spec.param))
    return WeightAdapter(module, spec)


def as_plain(module: Any) -> None:
    """Gives `module`, in place, its own class and attributes back."""
    for adapter in adapters_of(module):
        adapter.unmake()
    del module.dora_specs, module.dora_reads
    module.__class__ = module.plain_type
