"""A linen layer with an adapter, computed by the nnx layer of the same settings and parameters, so
that there is one implementation of each."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.linen.dtypes import promote_dtype

from dora_common.hyperparameters import ADAPTER_NAMES
from jax_dora.layers import DORA_CLASSES, DoRALayer, DoRARule
from jax_dora.layers.base_layer import pad_axes

# The nnx counterpart of each linen layer, and what linen calls its settings.
COUNTERPARTS: dict[type[nn.Module], tuple[type[nnx.Module], Mapping[str, str]]] = {
    nn.Dense: (nnx.Linear, {"out_features": "features"}),
    nn.DenseGeneral: (nnx.LinearGeneral, {"out_features": "features"}),
    nn.Einsum: (nnx.Einsum, {"kernel_shape": "shape"}),
    nn.Conv: (nnx.Conv, {"out_features": "features"}),
    nn.Embed: (nnx.Embed, {}),
}


def dora_class_of(module: nn.Module) -> type[DoRALayer] | None:
    """Returns the class that adapts a linen layer's counterpart; None where there is none."""
    counterpart = COUNTERPARTS.get(type(module))
    return counterpart and DORA_CLASSES[counterpart[0]]


def counterpart(
    module: Any, inputs: jax.Array, kernel: Any, *, kind: Any = None, **arguments: Any
) -> Any:
    """Returns the nnx layer with the settings of `module`, over its very parameters.

    Args:
      module: has the settings of a `kind`, which is its own type by default.
      inputs: of the call.
      kernel: the parameter that is to be adapted.
      kind: one of `COUNTERPARTS`.
      **arguments: the call's other arguments.
    """
    bias = module.get_variable("params", "bias") if getattr(module, "use_bias", False) else None
    cls, renamed = COUNTERPARTS[kind or type(module)]
    # None of the parameters is drawn.
    settings: dict[str, Any] = {"rngs": SimpleNamespace(params=lambda: None)}
    for name in inspect.signature(cls.__init__).parameters:
        if name.endswith("_init"):
            given = nn.unbox(bias if name == "bias_init" else kernel)
            settings[name] = lambda *_, given=given: given
        elif getattr(module, renamed.get(name, name), None) is not None:
            settings[name] = getattr(module, renamed.get(name, name))
    if settings.pop("promote_dtype", promote_dtype) is not promote_dtype:
        raise NotImplementedError("promote_dtype is not Flax's; expected the default")
    for name in ("dot_general_cls", "conv_general_dilated_cls"):
        if getattr(module, name, None) is not None:
            raise NotImplementedError(f"{name} is {getattr(module, name)}; expected None")
    settings |= {name: value for name, value in arguments.items() if value is not None}
    shape = nn.unbox(kernel).shape
    if cls is nnx.Linear:
        settings["in_features"] = shape[0]
    elif cls is nnx.LinearGeneral:
        axes = sorted(axis % inputs.ndim for axis in _as_tuple(module.axis))
        settings["axis"] = tuple(axes)
        settings["in_features"] = tuple(inputs.shape[axis] for axis in axes)
        settings["batch_axis"] = {axis: inputs.shape[axis] for axis in _as_tuple(module.batch_dims)}
    elif cls is nnx.Conv:
        settings["in_features"] = shape[-2] * module.feature_group_count
    elif cls is nnx.Einsum:
        settings["bias_shape"] = None if bias is None else nn.unbox(bias).shape
    make: Callable[..., Any] = cls
    return make(**settings)


def dora_layer(
    module: nn.Module, cls: type[DoRALayer], base: Any, options: DoRARule, kernel: Any
) -> DoRALayer:
    """Returns the DoRA layer over `base` with the adapter in `module`'s params, which is made where
    it is missing.

    Args:
      kernel: the parameter as `module` has it; a fresh adapter's are boxed like it, unless the
        initializer brings boxes of its own.
    """
    missing = [name for name in ADAPTER_NAMES if not module.has_variable("params", name)]
    if missing and not (len(missing) == 3 and module.is_mutable_collection("params")):
        path = "/".join(module.path)
        raise ValueError(
            f"params has no {missing[0]} for {path!r}; expected the adapter there: make it with "
            'init, or with apply(…, rngs={"params": key}, mutable=["params"])'
        )
    arguments: dict[str, Any] = options.options()
    if not missing:
        arguments["arrays"] = {
            name: nn.unbox(module.get_variable("params", name)) for name in ADAPTER_NAMES
        }
        return cls.from_base(base, rngs=nnx.Rngs(0), **arguments)
    boxes: dict[str, Any] = {}
    for name in ("lora_a", "lora_b"):
        if init := arguments.get(f"{name}_init"):
            arguments[f"{name}_init"] = functools.partial(_unboxed, init, boxes, name)
    layer = cls.from_base(base, rngs=nnx.Rngs(module.make_rng("params")), **arguments)
    for name, value in boxed_like(kernel, layer, boxes).items():
        module.put_variable("params", name, value)
    return layer


def boxed_like(kernel: Any, adapter: Any, boxes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns lora_a, lora_b and magnitude of a DoRA layer or adapted weight as linen's parameters.

    Args:
      kernel: where it is `nn.Partitioned`, they are too, by the names of the axes that they share.
      boxes: those that they have rather, by name.
    """
    made: dict[str, Any] = {}
    if isinstance(kernel, nn.Partitioned):
        axes = adapter.layout.adapter_axes(pad_axes(kernel.names, nn.unbox(kernel).ndim))
        made = {name: kernel.replace(names=axes[name]) for name in ADAPTER_NAMES}
    made |= boxes or {}
    values = {name: getattr(adapter, name)[...] for name in ADAPTER_NAMES}
    return values | {name: box.replace_boxed(values[name]) for name, box in made.items()}


def _unboxed(init: Any, boxes: dict[str, Any], name: str, *args: Any) -> Any:
    value = init(*args)
    if isinstance(value, nn.meta.AxisMetadata):
        boxes[name] = value
    return nn.unbox(value)


def _as_tuple(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
