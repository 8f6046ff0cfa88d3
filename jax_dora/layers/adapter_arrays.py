"""Creates the arrays of an adapter: fresh, or from given arrays."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.typing import Initializer

from jax_dora.layers.base_layer import axis_names, like_kernel
from jax_dora.layers.contraction import MatrixAxes
from jax_dora.layers.magnitude import fresh_magnitude
from jax_dora.layers.rule import DoRARule
from jax_dora.layers.stack import allocate_stack, set_layer
from jax_dora.ops import check

# Uniform in ±1/sqrt(in), as in PEFT and in torch.nn.Linear.
default_lora_a_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
default_lora_b_init = nnx.initializers.zeros_init()


class DoRAParam(nnx.LoRAParam):
    """The magnitude of a DoRA layer. A filter for `nnx.LoRAParam` selects it too."""


def make_adapter(
    layer: Any,
    rule: DoRARule,
    rngs: Any,
    inits: Mapping[str, Initializer],
    arrays: Mapping[str, jax.Array] | None = None,
) -> list[nnx.Dropout]:
    """Sets lora_a, lora_b and magnitude of a `DoRALayer` or `WeightAdapter`: from `arrays`, whose
    magnitude can be left out, or fresh, by `inits` if the rule has none of its own.

    Returns one `nnx.Dropout` for each layer of the stack; [] without dropout.
    """
    _check_streams(rngs, params=arrays is None, dropout=bool(rule.dropout))
    contraction, kernel, stack = layer.contraction, layer.kernel_param, layer.stack
    count, values, boxes, dropouts = math.prod(stack.shape), dict[str, Any](), {}, []
    for number, name in itertools.product(range(count), ("lora_a", "lora_b")):
        parameter = getattr(contraction, name)
        if arrays is None:
            init = getattr(rule, f"{name}_init") or inits[name]
            value = initialize(init, rngs.params(), parameter, rule.adapter_dtype)
        else:
            value = _check_shape(name, arrays[name], parameter.stored)
        if stack.shape:
            if isinstance(value, nnx.VariableMetadata):
                boxes[name], value = value, value.raw_value
            stacked = values[name] if number else allocate_stack(count, value)
            # Wait, so that at most one layer's array exists in addition to the stacked array.
            value = jax.block_until_ready(set_layer(stacked, value, number))
        values[name] = value
        if rule.dropout and name == "lora_b":
            dropouts.append(nnx.Dropout(rule.dropout, rngs=rngs))

    stack_names = stack.stack_part(axis_names(kernel))

    def set_parameter(name: str, kind: type[nnx.LoRAParam], value: Any) -> None:
        def own(names: tuple[Any, ...]) -> tuple[Any, ...]:
            of_layer = contraction.adapter_axes(stack.layer_part(names))[name]
            return stack.combine(stack.stack_part(names), of_layer)

        ndim = len(own((None,) * kernel.ndim))
        stack_axis = next(iter(stack.stack_part(range(ndim))), None)
        setattr(layer, name, like_kernel(kernel, kind, value, own, stack_axis))

    for name, value in values.items():
        if stack.shape:
            value = stack.move_stack_axes(value.reshape(*stack.shape, *value.shape[1:]))
        if box := boxes.get(name):
            metadata = dict(box.metadata)
            if "out_sharding" in metadata:
                metadata["out_sharding"] = stack.combine(stack_names, metadata["out_sharding"])
            value = dataclasses.replace(box, raw_value=value, metadata=metadata)
        set_parameter(name, nnx.LoRAParam, value)
    if arrays is None or "magnitude" not in arrays:
        magnitude = fresh_magnitude(layer)
        check.quantised_norm("its kernel", kernel.get_value(), magnitude)
    else:
        magnitude = _check_shape("magnitude", arrays["magnitude"], contraction.magnitude.stored)
    set_parameter("magnitude", DoRAParam, magnitude)
    return dropouts


def _check_streams(rngs: Any, **needed: bool) -> None:
    """Raises ValueError if `rngs` is not None and lacks a stream that is needed."""
    for stream in (name for name, is_needed in needed.items() if is_needed):
        if rngs is not None and not {stream, "default"}.intersection(rngs):
            raise ValueError(
                f"rngs has no {stream!r} stream, only {sorted(rngs)}; expected nnx.Rngs(0), or one "
                f"with {stream}= too"
            )


def initialize(init: Any, key: jax.Array, parameter: MatrixAxes, dtype: Any) -> Any:
    """Returns a parameter that `init` draws matrix by matrix, or at once if `init.of_parameter`."""
    n, *matrix = parameter.matrices
    shape = tuple(matrix)
    if shape == parameter.stored or getattr(init, "of_parameter", False):
        return init(key, parameter.stored, dtype)  # may be an nnx.VariableMetadata
    if n == 1:
        return parameter.from_matrices(init(key, shape, dtype)[None])
    keys = jax.random.split(key, n)
    return parameter.from_matrices(jax.vmap(lambda key: init(key, shape, dtype))(keys))


def _check_shape(name: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if tuple(array.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; a layer of this rule expects {shape}: use the "
            "rank that the adapter was created with"
        )
    return array
