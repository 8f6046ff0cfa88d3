"""Modules whose own code reads adapted weights.

Each gets a subclass of its class, created on demand. The methods of the subclass run the original
code while the adapted weights are traced.
"""

import contextlib
import copyreg
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
from flax import nnx

from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.adapt.weight_adapter import ATTRIBUTES, WeightAdapter
from jax_dora.layers import DoRALayer
from jax_dora.layers.base_layer import is_node
from jax_dora.tracing.trace import is_weight_tracer, weight_trace


def has_dora_type(module: Any) -> bool:
    """Returns whether the module's class was created by `dora_type`."""
    cls = type(module)
    return vars(cls).get("plain_type") is cls.__base__


@functools.cache
def dora_type(base: type[nnx.Module]) -> type[Any]:
    """Returns the subclass of `base` whose methods and properties trace adapted weights. Its
    `plain_type` is `base`. A module has `dora_weights`, the adapted weights that it owns, with
    paths from it, and `dora_reads`, those that its methods read: (path from it to the owner, the
    parameter's name)."""
    methods = {name: _with_tracing(method) for name, method in own_methods(base).items()}
    methods |= {
        name: property(_with_tracing(prop.fget), prop.fset, prop.fdel, prop.__doc__)
        for name, prop in inspect.getmembers(base, lambda value: isinstance(value, property))
        if prop.fget is not None and not name.startswith(_FRAMEWORK_PREFIXES)
    }
    if issubclass(base, nnx.Dict):
        methods["__iter__"] = _own_keys
    return _metaclass(type(base))(
        f"DoRA{base.__name__}",
        (base,),
        {"plain_type": base, "__module__": base.__module__, **methods},
    )


def _own_keys(self: Any) -> Iterator[str]:
    """Yields the keys of an `nnx.Dict` without the attributes of its adapters."""
    added = added_attributes(self)
    return (key for key in self.plain_type.__iter__(self) if key not in added)


def added_attributes(module: Any) -> set[str]:
    """Returns the names of the attributes that adapters and their reads add to a module."""
    weights = vars(module).get("dora_weights", ())
    added = {weight.attribute(name) for weight in weights for name in ATTRIBUTES}
    return added | {"dora_weights", "dora_reads", "dora_scope", "dora_log"}


@functools.cache
def _metaclass(kind: type[type]) -> Any:
    """Returns a metaclass that makes the classes of `dora_type` picklable."""
    metaclass = type(f"DoRA{kind.__name__}", (kind,), {})
    copyreg.pickle(metaclass, lambda cls: (dora_type, (cast(Any, cls).plain_type,)))
    return metaclass


# The prefixes of methods that Python, JAX's pytrees and Flax's graphs call.
_FRAMEWORK_PREFIXES = ("__", "_pytree_", "_graph_node_")


def own_methods(module_type: type[Any]) -> dict[str, Any]:
    """Returns `__call__` and the other methods that a class, or a base class outside Flax, defines
    itself."""
    found: dict[str, Any] = {}
    flax_classes = {nnx.bridge.ToNNX, *nnx.Module.__mro__}
    for cls in module_type.__mro__:
        if cls in flax_classes:
            continue
        for name, value in vars(cls).items():
            if name in found or (name.startswith(_FRAMEWORK_PREFIXES) and name != "__call__"):
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


def _with_tracing(method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        with trace_adapted_weights(self) as to_arrays:
            return to_arrays(bound(*args, **kwargs))

    return call


@contextlib.contextmanager
def trace_adapted_weights(module: Any) -> Iterator[Callable[[Any], Any]]:
    """Traces the adapted weights that the methods of `module` read, and its own, even if only
    another module's methods are known to read them. Yields a function that replaces traced weights
    in a method's result by arrays.

    Meanwhile the adapter's attribute holds a variable of its own, because other attributes may hold
    the same parameter without this adapter.
    """
    own = (((), weight.param) for weight in module.dora_weights)
    adapters = [
        adapter
        for path, param in dict.fromkeys((*module.dora_reads, *own))
        for adapter in adapters_of(at_path(module, path))
        if adapter.weight.param == param
        and not is_weight_tracer(adapter.kernel_param.get_raw_value())
    ]
    if not adapters:
        yield lambda result: result
        return
    variables = [adapter.kernel_param for adapter in adapters]
    traced_variables = []
    with weight_trace() as trace:
        for adapter, variable in zip(adapters, variables, strict=True):
            value: Any = adapter.traced(trace, variable.get_raw_value())
            traced_variable = type(variable).from_metadata(value, variable.get_metadata())
            traced_variables.append(traced_variable)
            vars(adapter.module)[adapter.weight.param] = traced_variable

        def to_arrays(result: Any) -> Any:
            leaves = jax.tree.leaves(result, is_leaf=is_node)
            if not any(map(is_weight_tracer, leaves)):
                return result
            return jax.tree.map(trace.array, result, is_leaf=is_node)

        try:
            yield to_arrays
        finally:
            triples = zip(adapters, variables, traced_variables, strict=True)
            for adapter, variable, traced_variable in triples:
                if adapter.kernel_param is traced_variable:
                    vars(adapter.module)[adapter.weight.param] = variable


def at_path(module: Any, path: tuple[str, ...]) -> Any:
    """Returns the value at `path` below `module`."""
    for key in path:
        if isinstance(module, list | tuple):
            module = module[int(key)]
        elif isinstance(module, dict):
            module = module[key] if key in module else module[int(key)]
        else:
            module = getattr(module, key)
    return module


def adapters_of(module: Any) -> list[WeightAdapter]:
    """Returns the adapted weights that `module` owns, other than the kernel of a `DoRALayer`."""
    if not has_dora_type(module):
        return []
    return [WeightAdapter(module, weight) for weight in module.dora_weights]


def adapter_of(weight: AdaptableWeight) -> DoRALayer | WeightAdapter | None:
    """Returns the DoRA layer or `WeightAdapter` with a weight's adapter; None if there is none."""
    if isinstance(weight.module, DoRALayer):
        return weight.module
    adapters = adapters_of(weight.module)
    return next((one for one in adapters if one.weight.param == weight.param), None)


def set_dora_class(module: Any) -> None:
    """Changes the class of `module`, in place, to its subclass that traces adapted weights."""
    if not has_dora_type(module):
        module.dora_weights, module.dora_reads = (), ()
        module.__class__ = dora_type(type(module))


def add_adapter(
    module: Any, weight: AdaptableWeight, reader: Any, path: tuple[str, ...]
) -> WeightAdapter:
    """Returns a new adapter, without arrays yet, for a weight of `module`, which the methods of
    `reader` read; `path` leads from the reader to `module`."""
    set_dora_class(module)
    set_dora_class(reader)
    module.dora_weights = (*module.dora_weights, weight)
    reader.dora_reads = (*reader.dora_reads, (path, weight.param))
    return WeightAdapter(module, weight)


def restore_plain_class(module: Any) -> None:
    """Restores the original class of `module`, in place, and removes the adapters' attributes."""
    for adapter in adapters_of(module):
        adapter.delete_arrays()
    del module.dora_weights, module.dora_reads
    module.__class__ = module.plain_type
