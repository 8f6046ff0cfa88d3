"""The DoRA layer of a linen layer.

It is the DoRA layer of the nnx layer with the same settings and parameters, so that each layer has
only one implementation.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import jax
from flax import linen as nn
from flax import nnx
from flax.linen.dtypes import promote_dtype

from dora_common.hyperparameters import ADAPTER_NAMES
from jax_dora.adapt.bridge import is_adapter
from jax_dora.layers import DORA_CLASSES, DoRALayer, DoRARule
from jax_dora.layers.base_layer import pad_axes

# The nnx counterpart of each linen layer, and linen's names for settings that nnx names otherwise.
COUNTERPARTS: dict[type[nn.Module], tuple[type[nnx.Module], Mapping[str, str]]] = {
    nn.Dense: (nnx.Linear, {"out_features": "features"}),
    nn.DenseGeneral: (nnx.LinearGeneral, {"out_features": "features"}),
    nn.Einsum: (nnx.Einsum, {"kernel_shape": "shape"}),
    nn.Conv: (nnx.Conv, {"out_features": "features"}),
    nn.Embed: (nnx.Embed, {}),
}


# Marks the names of an adapter in a scope, where Flax records the names that a module declares.
_ADAPTER = "jax_dora"


def dora_class_of(module: nn.Module) -> type[DoRALayer] | None:
    """Returns the class that adapts a linen layer's nnx counterpart; None if there is none."""
    counterpart = COUNTERPARTS.get(type(module))
    return counterpart and DORA_CLASSES[counterpart[0]]


def counterpart(
    module: Any, inputs: jax.Array, kernel: Any, *, kind: Any = None, **arguments: Any
) -> Any:
    """Returns the nnx layer with the settings and parameters of `module`, which has the settings of
    `kind`, one of `COUNTERPARTS`. `kernel` is the parameter to adapt; `inputs` and `arguments` are
    those of the call. Raises NotImplementedError if a setting has no nnx counterpart."""
    bias = module.get_variable("params", "bias") if getattr(module, "use_bias", False) else None
    cls, renamed = COUNTERPARTS[kind or type(module)]
    # The initializers return the existing parameters, so no key is needed.
    settings: dict[str, Any] = {"rngs": SimpleNamespace(params=lambda: None)}
    for name in inspect.signature(cls.__init__).parameters:
        if name.endswith("_init"):
            value = nn.unbox(bias if name == "bias_init" else kernel)
            settings[name] = lambda *_, value=value: value
        elif getattr(module, renamed.get(name, name), None) is not None:
            settings[name] = getattr(module, renamed.get(name, name))
    if settings.pop("promote_dtype", promote_dtype) is not promote_dtype:
        raise NotImplementedError("promote_dtype is not Flax's own; expected the default")
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
    """Returns the DoRA layer over `base` with the adapter in the params of `module`. If it is
    missing it is created, in the same kind of box as `kernel` unless an initializer returns its
    own; a magnitude that alone is missing gives g = 1. Raises ValueError if that cannot be, since
    params is not mutable or the call is in an `nn.while_loop`; or if code of the model has declared
    one of its names."""
    for name in ADAPTER_NAMES:
        cast(Any, module.scope).reservations[name].add(_ADAPTER)
    check_own_names(module)
    missing = [name for name in ADAPTER_NAMES if not module.has_variable("params", name)]
    scope: Any = module.scope
    is_in_loop = any("while_loop(" in name for name in scope.debug_path)
    can_create = module.is_mutable_collection("params") and not is_in_loop
    if missing and not (missing in (["magnitude"], [*ADAPTER_NAMES]) and can_create):
        path = "/".join(module.path)
        outside = ", method=…) with a method that calls the layer outside of nn.while_loop"
        raise ValueError(
            f"params has no {missing[0]} for {path!r}; expected the layer's adapter: create it by "
            'init, or by apply(…, rngs={"params": key}, mutable=["params"]'
            f"{outside if is_in_loop else ')'}"
        )
    arguments: dict[str, Any] = options.options()
    if len(missing) < 3:
        arguments["arrays"] = {
            name: nn.unbox(module.get_variable("params", name))
            for name in ADAPTER_NAMES
            if name not in missing
        }
        layer = cls.from_base(base, rngs=nnx.Rngs(0), **arguments)
        for name in missing:
            module.put_variable("params", name, boxed_like(kernel, layer)[name])
        return layer
    boxes: dict[str, Any] = {}
    for name in ("lora_a", "lora_b"):
        if init := arguments.get(f"{name}_init"):
            arguments[f"{name}_init"] = functools.partial(_unboxed, init, boxes, name)
    layer = cls.from_base(base, rngs=nnx.Rngs(module.make_rng("params")), **arguments)
    for name, value in boxed_like(kernel, layer, boxes).items():
        module.put_variable("params", name, value)
    return layer


def check_own_names(module: nn.Module) -> None:
    """Raises ValueError if the code of a module has declared, in this call, parameters that are
    named like an adapter's arrays: in the scope of an adapted layer, or all three side by side,
    which `split_adapters` would take for an adapter."""
    reservations = cast(Any, module.scope).reservations
    declared = {name for name, columns in reservations.items() if "params" in columns}
    taken = {name for name in declared if _ADAPTER in reservations[name]}
    taken |= {name for name in declared if is_adapter((name,), {(other,) for other in declared})}
    if taken:
        raise ValueError(
            f"the module at {'/'.join(module.path)!r} has parameters of its own with the names of "
            f"an adapter's: {', '.join(sorted(taken))}; expected other names, since adapters are "
            "stored next to the weights and found by these names: rename the parameters in the "
            "module"
        )


def boxed_like(kernel: Any, adapter: Any, boxes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns lora_a, lora_b and magnitude of a DoRA layer or adapted weight as linen parameters:
    in `boxes`, those that initializers returned, or else `nn.Partitioned` as `kernel`, with the
    names of its axes."""
    all_boxes: dict[str, Any] = {}
    if isinstance(kernel, nn.Partitioned):
        axes = adapter.contraction.adapter_axes(pad_axes(kernel.names, nn.unbox(kernel).ndim))
        all_boxes = {name: kernel.replace(names=axes[name]) for name in ADAPTER_NAMES}
    all_boxes |= boxes or {}
    values = {name: getattr(adapter, name)[...] for name in ADAPTER_NAMES}
    return values | {name: box.replace_boxed(values[name]) for name, box in all_boxes.items()}


def _unboxed(init: Any, boxes: dict[str, Any], name: str, *args: Any) -> Any:
    value = init(*args)
    if isinstance(value, nn.meta.AxisMetadata):
        boxes[name] = value
    return nn.unbox(value)


def _as_tuple(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
