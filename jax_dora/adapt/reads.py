"""Finds the operations that read each weight, in one abstract call of an nnx model.

The reads show whether a weight can be adapted, and which weight is the output head's.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jax_dora.adapt.adapted_class import own_methods
from jax_dora.adapt.bridge import LinenModule
from jax_dora.adapt.tree import Modules, find_modules, shared_variables, without_adapters
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.layers import kind_of
from jax_dora.layers.dora_layer import Constant
from jax_dora.layers.stack import STACK_LETTERS, stacked_axes, without_stack_axes
from jax_dora.ops import quantised
from jax_dora.tracing.read_log import Example, Key, Read, ReadLog, split_arrays
from jax_dora.tracing.registry import registrations
from jax_dora.tracing.trace import weight_trace


def weights_of(module: Any) -> dict[str, nnx.Param]:
    """Returns the parameters of two axes or more that are attributes of `module`. They are
    `nnx.Param`s, but the kernel of a known layer and a registered parameter may be variables of any
    type."""
    kind = kind_of(module)
    known = {kind.kernel_name} if kind else registrations(module).keys()
    return {
        name: value
        for name, value in vars(module).items()
        if is_weight(value, nnx.Variable if name in known else nnx.Param)
    }


def is_weight(value: Any, kind: type[nnx.Variable] = nnx.Param) -> bool:
    """Returns whether `value` is a parameter of two axes or more that belongs to no adapter."""
    is_parameter = isinstance(value, kind) and not isinstance(value, nnx.LoRAParam | Constant)
    return is_parameter and getattr(value, "ndim", 0) > 1


def record_reads(model: nnx.Module, example: Example) -> ReadLog:
    """Calls a model abstractly, without its adapters, and returns the operations that read its
    weights. Raises any error of the call."""
    copy, modules = without_adapters(model)
    shared = shared_variables(modules)
    # Attributes that share a parameter get a variable each, to tell their reads apart.
    for module in modules.values():
        for name, variable in weights_of(module).items():
            if id(variable) in shared:
                setattr(module, name, variable.copy())
    weights = _weights(modules)
    log = ReadLog(weights, [paths[0] for paths in modules])
    for number, module in enumerate(modules.values()):
        kind = type(module)
        # The attributes of these modules are user-chosen keys or a linen module's variables, so
        # the bookkeeping attributes below must not be added. A `LinenModule` knows them.
        keyed = issubclass(kind, nnx.List | nnx.Dict | nnx.bridge.ToNNX)
        if not keyed or issubclass(kind, LinenModule):
            module.dora_scope, module.dora_log = number, log
            module.__class__ = _scoped_type(kind)

    def run(model_arrays: Any, inputs_arrays: Any) -> None:
        traced, inputs = rebuild_model(model_arrays), rebuild_inputs(inputs_arrays)
        weights = _weights(find_modules(traced))
        with weight_trace() as trace:
            for key in log.reads:
                raw = weights[key].get_raw_value()
                value = log.traced(trace, key, quantised.dense(raw, raw.dtype))
                weights[key].set_raw_value(value, _unsafe_bypass_check=True)
            log.record_result(inputs.call(traced))

    model_arrays, rebuild_model = split_arrays(copy)
    inputs_arrays, rebuild_inputs = split_arrays(example)
    log.run(run, model_arrays, inputs_arrays, example)
    mark_mapped_axes(log, {key: weight.shape for key, weight in weights.items()})
    return log


def mark_mapped_axes(log: ReadLog, shapes: Mapping[Key, tuple[int, ...]]) -> None:
    """Marks, in place, the stack axes of weights of these shapes that have fewer axes in the
    methods of their modules."""
    for key, reads in log.reads.items():
        if (method_shape := log.method_shapes.get(key)) is not None:
            log.reads[key] = tuple(
                dataclasses.replace(
                    read, axes=_with_mapped_axes(read.axes, shapes[key], method_shape)
                )
                for read in reads
            )


def _weights(modules: Modules) -> dict[Key, nnx.Param]:
    return {
        (paths[0], name): variable
        for paths, module in modules.items()
        for name, variable in weights_of(module).items()
    }


def _with_mapped_axes(axes: str, shape: tuple[int, ...], method_shape: tuple[int, ...]) -> str:
    """Returns the axes of a read of a weight of `shape`, with letters for the stack axes that a
    vmap has removed: in the methods of its module the weight has `method_shape`. If all layers of a
    stack share an input, such an axis looks like a feature axis in the read."""
    unstacked = [axis for axis, role in enumerate(axes) if role not in STACK_LETTERS]
    sizes = [shape[axis] for axis in unstacked]
    for removed in stacked_axes(sizes, method_shape):
        mapped = [unstacked[axis + number] for number, axis in enumerate(removed)]
        if all(axes[axis] in "bo" for axis in mapped):
            letters = iter(STACK_LETTERS[len(axes) - len(unstacked) :])
            return "".join(next(letters) if n in mapped else role for n, role in enumerate(axes))
    return axes


@functools.cache
def _scoped_type(base: type[Any]) -> type[Any]:
    """Returns a subclass of a module's class. Its methods run in a `jax.named_scope` that
    identifies the module, and record the shapes that its parameters have there."""

    def scoped(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            for name, value in vars(self).items():
                # A variable that holds a dict has no shape.
                if isinstance(value, nnx.Variable) and hasattr(value, "shape"):
                    self.dora_log.record_shape(self.dora_scope, name, value.shape)
            with jax.named_scope(f"dora[{self.dora_scope}]"):
                return method.__get__(self, type(self))(*args, **kwargs)

        return call

    methods = {name: scoped(method) for name, method in own_methods(base).items()}
    kind: Any = type(base)
    return kind(base.__name__, (base,), {"__module__": base.__module__, **methods})


def has_adapted_form(read: Read, axes: str) -> bool:
    """Returns whether the operation `read` has an adapted form for a weight with these axes."""
    if read.kind == "other":
        return False
    read_axes, weight_axes = (without_stack_axes(letters, "b") for letters in (read.axes, axes))
    if read.kind == "lookup":
        return read_axes == weight_axes
    transposed = read_axes.translate(str.maketrans("io", "oi"))
    return any(
        all(a == b or (a != "b" and b == "b") for a, b in zip(form, weight_axes, strict=True))
        for form in (read_axes, transposed)
    )


def reader_of(
    weight: AdaptableWeight, reads: tuple[Read, ...]
) -> tuple[str, tuple[str, ...]] | None:
    """Returns the path of the innermost module that contains a weight and runs all its reads in its
    own methods, and the path from that module to the weight's owner; None if there is no such
    module."""
    scopes = frozenset.intersection(*(read.scopes for read in reads))
    readers = {id(weight.modules.get(path)) for path in scopes}
    for path in weight.module_paths:
        parts = path.split("/") if path else []
        for length in range(len(parts), -1, -1):
            reader = weight.modules.get(above := "/".join(parts[:length]))
            if reader is not None and id(reader) in readers:
                return above, tuple(parts[length:])
    return None


def find_output_heads(log: ReadLog | None) -> list[Key]:
    """Returns the output head's weight, if there is one, as a list: the weight of the call's last
    product, if the product's features are the last axis of a result and as many as the rows of an
    embedding that inputs of the call look up. If such an embedding has as many features too, as in
    a model without a head, it must be tied to the weight."""
    if log is None:
        return []
    products = [
        (read, key) for key, reads in log.reads.items() for read in reads if read.kind == "product"
    ]
    lookups = [
        (read, key)
        for key, reads in log.reads.items()
        for read in reads
        if read.kind == "lookup" and read.order in log.input_lookups
    ]
    if not products:
        return []
    last, key = max(products, key=lambda product: product[0].order)
    tables = [(read, other) for read, other in lookups if read.features == last.features]
    is_head = any(other == key or read.width != last.features for read, other in tables)
    return [key] if is_head and last.features in log.results else []
