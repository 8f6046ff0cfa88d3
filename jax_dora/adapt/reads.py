"""Finds, in one abstract call of an nnx model, what reads each weight, whether an adapter can stand
there, and which weight is the head's."""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx

from jax_dora.adapt.tree import Found, find_modules, remove_dora, shared_variables
from jax_dora.layers.base import Constant
from jax_dora.layers.registry import kind_of
from jax_dora.layers.stack import stacked_axes
from jax_dora.ops import quantised
from jax_dora.weights.module import own_methods
from jax_dora.weights.reads import Example, Key, Read, ReadLog, apart
from jax_dora.weights.registry import registrations
from jax_dora.weights.trace import weight_trace


def weights_of(module: Any) -> dict[str, nnx.Param]:
    """Returns the parameters of two axes or more that a module holds as attributes; those that are
    known by name may be variables of any type."""
    kind = kind_of(module)
    known = {kind.kernel_name} if kind else registrations(module).keys()
    return {
        name: value
        for name, value in vars(module).items()
        if is_weight(value, nnx.Variable if name in known else nnx.Param)
    }


def is_weight(value: Any, kind: type[nnx.Variable] = nnx.Param) -> bool:
    """Returns whether a value is a parameter of two axes or more, and none of an adapter."""
    is_parameter = isinstance(value, kind) and not isinstance(value, nnx.LoRAParam | Constant)
    return is_parameter and getattr(value, "ndim", 0) > 1


def trace_reads(model: nnx.Module, example: Example) -> ReadLog:
    """Calls a model abstractly, without its adapters, and returns what reads its weights.

    Raises:
      Whatever the call raises.
    """
    copy = remove_dora(model)
    modules = find_modules(copy)
    shared = shared_variables(copy)
    # Attributes that share a parameter get a variable each, so that their reads are told apart.
    for found in modules:
        for name, variable in weights_of(found.module).items():
            if id(variable) in shared:
                setattr(found.module, name, variable.copy())
    weights = _weights(copy)
    log = ReadLog(weights, [found.paths[0] for found in modules])
    for number, found in enumerate(modules):
        # Their attributes are not their own: members, or a linen module's variables.
        if not isinstance(found.module, nnx.List | nnx.Dict | nnx.bridge.ToNNX):
            found.module.dora_scope, found.module.dora_log = number, log
            found.module.__class__ = _scoped_type(type(found.module))

    def run(arrays: Any) -> None:
        traced, given = together(arrays)
        weights = _weights(traced)
        with weight_trace() as trace:
            for key in log.reads:
                raw = weights[key].get_raw_value()
                value = log.follow(trace, key, quantised.dense(raw, raw.dtype))
                weights[key].set_raw_value(value, _unsafe_bypass_check=True)
            log.end(given.call(traced))

    arrays, together = apart((copy, example))
    jax.eval_shape(run, arrays)
    for key, reads in log.reads.items():
        if (seen := log.seen.get(key)) is not None:
            whole = weights[key].shape
            log.reads[key] = tuple(
                dataclasses.replace(read, axes=_with_mapped_axis(read.axes, whole, seen))
                for read in reads
            )
    return log


def _weights(model: nnx.Module) -> dict[Key, nnx.Param]:
    return {
        (found.paths[0], name): variable
        for found in find_modules(model)
        for name, variable in weights_of(found.module).items()
    }


def _with_mapped_axis(axes: str, whole: tuple[int, ...], seen: tuple[int, ...]) -> str:
    """Returns the axes of a read, with that of a stack which `nnx.vmap` has taken apart as one of
    layers: beside an input that all of them share, it looks like one of features.

    Args:
      whole: the weight's shape.
      seen: its shape in the methods of its module.
    """
    left = [axis for axis, role in enumerate(axes) if role != "s"]
    if len(left) != len(seen) + 1:
        return axes
    mapped = [left[one] for one in stacked_axes([whole[axis] for axis in left], seen)]
    first = next((one for one in mapped if axes[one] in "bo"), None)
    return axes if first is None else f"{axes[:first]}s{axes[first + 1 :]}"


@functools.cache
def _scoped_type(base: type[Any]) -> type[Any]:
    """Returns a subclass of a module's class whose methods run in a named scope of its own, and
    note the shapes of its parameters there."""

    def scoped(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            for name, value in vars(self).items():
                if isinstance(value, nnx.Variable) and hasattr(value, "shape"):  # not of a dict
                    self.dora_log.see(self.dora_scope, name, value.shape)
            with jax.named_scope(f"dora[{self.dora_scope}]"):
                return method.__get__(self, type(self))(*args, **kwargs)

        return call

    methods = {name: scoped(method) for name, method in own_methods(base).items()}
    kind: Any = type(base)
    return kind(base.__name__, (base,), {"__module__": base.__module__, **methods})


def is_adapted_read(read: Read, axes: str) -> bool:
    """Returns whether the operation has an adapted form along these axes."""
    if read.kind == "other":
        return False
    flat, mine = (one.replace("s", "b") for one in (read.axes, axes))
    swapped = flat.translate(str.maketrans("io", "oi"))
    loose = [
        all(a == b or (a != "b" and b == "b") for a, b in zip(form, mine, strict=True))
        for form in (flat, swapped)
    ]
    return flat == mine if read.kind == "lookup" else any(loose)


def reader_of(
    found: Found, modules: list[Found], reads: tuple[Read, ...]
) -> tuple[Any, tuple[str, ...]] | None:
    """Returns the innermost module that holds a weight and in whose methods all of its reads
    stand, and the path from it to the weight's owner."""
    numbers = {path: index for index, one in enumerate(modules) for path in one.paths}
    inside = frozenset.intersection(*(read.scopes for read in reads))
    for path in found.paths:
        parts = path.split("/") if path else []
        for length in range(len(parts), -1, -1):
            index = numbers.get("/".join(parts[:length]))
            if index is not None and inside.intersection(modules[index].paths):
                return modules[index].module, tuple(parts[length:])
    return None


def heads(traced: ReadLog | None) -> list[Key]:
    """Returns the weight, if any, whose product makes the result's last axis, of the size of a
    vocabulary that is looked up."""
    if traced is None:
        return []
    products = [
        (read, key)
        for key, reads in traced.reads.items()
        for read in reads
        if read.kind == "product"
    ]
    vocabularies = {
        read.features for reads in traced.reads.values() for read in reads if read.kind == "lookup"
    }
    if not products:
        return []
    last, key = max(products, key=lambda one: one[0].order)
    return [key] if last.features in vocabularies & traced.results else []
