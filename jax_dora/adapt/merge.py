"""`merge_dora`: merges adapters into the weights of plain layers, in fp32, cast once."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.merge_report import MergedLayer, MergeReport
from dora_common.peft.folder import check_finite
from dora_common.rules import listing
from jax_dora import ops
from jax_dora.adapt.adapter import Adapter, check_adapter, set_adapter
from jax_dora.adapt.tied_heads import untie_heads
from jax_dora.adapt.tree import (
    Modules,
    by_path,
    check_model,
    close_linen_modules,
    find_dora_layers,
    named_in_errors,
    shared_variables,
    without_adapters,
)
from jax_dora.adapt.weight_adapter import WeightAdapter
from jax_dora.layers import DoRALayer
from jax_dora.layers.base_layer import check_has_values, set_and_verify
from jax_dora.layers.contraction import Contraction
from jax_dora.layers.magnitude import bounded_norm, check_rank, matrix_norm
from jax_dora.layers.quantised_kernel import check_kernel, compute_plain
from jax_dora.layers.stack import Stack
from jax_dora.ops import check, quantised
from jax_dora.ops.dispatch import mesh as meshes
from jax_dora.ops.rounding import round_to

_LOG = logging.getLogger("jax_dora")


@overload
def merge_dora[Model: nnx.Module](
    model: Model,
    *,
    adapters: Sequence[Adapter] | None = None,
    requantize: Literal[False] = False,
    return_report: Literal[False] = False,
) -> Model: ...
@overload
def merge_dora[Model: nnx.Module](
    model: Model,
    *,
    adapters: Sequence[Adapter] | None = None,
    requantize: bool = False,
    return_report: Literal[True],
) -> tuple[Model, MergeReport]: ...
def merge_dora(
    model: Any,
    *,
    adapters: Sequence[Adapter] | None = None,
    requantize: bool = False,
    return_report: bool = False,
) -> Any:
    """Returns `model` as a plain model, with every adapter merged into its layer's kernel.

    The kernel becomes W' = W + ((g-1)∘W + g∘(s·lora_a lora_b)), computed in fp32 and cast once to
    the kernel's dtype. In bf16 that cast can lose more than a small adapter changes;
    `return_report` measures it. `model` stays unchanged, so keep it to undo the merge: there is no
    operation that recovers W from W'.

    A quantised kernel becomes a bf16 kernel. Rounding it to the quantised format again can lose all
    that the adapter changed. `requantize` does it anyway, and then requires `return_report`.

    If an embedding's `adapt_attend` is False, an output head that is tied to it keeps the base
    array: a head that is None becomes an `nnx.Linear`, or the embedding a
    `jax_dora.peft.UntiedEmbed`. PEFT's merging changes the head too, unlike PEFT's adapter.

    If layers share a parameter, each has its own adapter and gets its own merged array. Other
    modules that refer to the parameter keep the base value, as in `model`.

    A warning is logged for adapters that are as they were created while others have changed.

    Args:
      model: a model with an adapter; dropout has no effect.
      adapters: adapters to merge into the base of `model`, instead of its own adapter. They are
        merged in turn, as PEFT does since 0.21. Each step replaces W' by g∘(W' + s·lora_a lora_b),
        where g is the adapter's magnitude divided by its norm over the base W alone. So each
        adapter also scales those merged before it, and the order matters. The cast to the kernel's
        dtype is done once, after the last.
      requantize: return quantised kernels in the same format and tiles instead of bf16, with new
        scales and without zero points. New scales of int4 and int8 round even an unchanged kernel
        again; the report counts that as rounding.
      return_report: also return a `dora_common.merge_report.MergeReport`.

    Returns:
      The merged model, or (merged model, report).

    Raises:
      TypeError: `model` is not an nnx module, or one of `adapters` is not an `Adapter`.
      ValueError: there is no adapter to merge, or one contains NaN or infinity; or one of
        `adapters` does not fit the model; or `requantize` is True without `return_report`; or
        `model` is abstract, outside `nnx.eval_shape`; or the scales of a quantised kernel are zero
        or not finite, before or after the merge.
      NotImplementedError: a kernel's variable returns another value than was set.
    """
    if requantize and not return_report:
        raise ValueError(
            "requantize is True and return_report False; expected both True: rounding to the "
            "quantised format can lose an adapter, and the report tells how much of it is lost in "
            "each layer"
        )
    if adapters is not None and not isinstance(adapters, Sequence):
        raise TypeError(
            f"adapters is a {type(adapters).__name__}; expected a list of Adapters, or None"
        )
    for number, adapter in enumerate(adapters or ()):
        check_adapter(f"adapters[{number}]", adapter)
    check_model(model, for_linen="jax_dora.linen.merge_dora")
    for name, values in {"model": model, "one of adapters": adapters}.items():
        check_has_values(values, "jax_dora.merge_dora", name=name, can_trace=not return_report)
    merged, modules = without_adapters(model)
    models = [model]
    if adapters is not None:
        models = [set_adapter(merged, _without_dropout(adapter)) for adapter in adapters]
    sources: dict[str, list[DoRALayer | WeightAdapter]] = {}
    for number, adapted in enumerate(models):
        dora_layers = find_dora_layers(adapted)
        prefix = "" if adapters is None else f"adapters[{number}]: "
        check_arrays(
            {
                f"{prefix}{name} of {paths[0]!r}": getattr(layer, name)[...]
                for paths, layer in dora_layers.items()
                for name in ADAPTER_NAMES
            }
        )
        _warn_of_untrained(dora_layers, prefix)
        # By every path, since the first path of a shared layer may differ in a copy.
        for path, layer in by_path(dora_layers).items():
            sources.setdefault(path, []).append(layer)
    if not sources:
        raise ValueError(
            f"model holds no adapter and adapters is {adapters!r}; expected a model from "
            "apply_dora, or adapters from get_adapter"
        )
    layers, shared, done = [], shared_variables(modules), set()
    bases = by_path(modules)
    for path, layer_adapters in sources.items():
        adapter, name = layer_adapters[0], layer_adapters[0].kernel_name
        base = bases[adapter.module_path(path) if isinstance(adapter, WeightAdapter) else path]
        if (id(base), name) in done:
            continue
        done.add((id(base), name))
        # Other attributes that share the parameter keep the base value.
        if id(getattr(base, name)) in shared:
            setattr(base, name, getattr(base, name).copy())
        of_head = [one for one in layer_adapters if getattr(one, "adapt_attend", None) is not False]
        if len(of_head) < len(layer_adapters):
            merged = _untie_heads(merged, base, of_head)
        layers.append(_merge_layer(path, base, layer_adapters, requantize, return_report))
    merged = close_linen_modules(merged)
    return (merged, MergeReport(tuple(filter(None, layers)))) if return_report else merged


def _untie_heads(model: Any, embed: Any, adapters: list[Any]) -> Any:
    """Returns `model`, changed in place, with a head that keeps the array of `embed`, with only
    these adapters merged into it."""
    kernel = embed.embedding.get_value()
    if adapters:
        change: Any = functools.reduce(weight_change, adapters, None)
        embed.embedding.set_value(add_change(kernel, change))
    model = untie_heads(model, embed)
    embed.embedding.set_value(kernel)
    return model


def check_arrays(arrays: Mapping[str, jax.Array]) -> None:
    """Raises ValueError if an array of an adapter contains NaN or infinity; its key is its name.
    The host waits once for all."""
    concrete = {name: array for name, array in arrays.items() if not isinstance(array, Tracer)}
    finite = jax.device_get({name: _is_finite(array) for name, array in concrete.items()})
    for name in concrete:
        if not finite[name]:
            check_finite(name, concrete[name])


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _warn_of_untrained(layers: Modules, prefix: str) -> None:
    """Warns of adapters that no gradient has reached while others have changed: the model reads the
    weight itself instead of calling the layer. `prefix` begins the warning."""
    is_trained: dict[str, bool] = {}
    for paths, layer in layers.items():
        arrays = (layer.lora_a[...], layer.lora_b[...])
        if not any(isinstance(array, Tracer) for array in arrays):
            is_trained[paths[0]] = all(bool(jnp.any(array)) for array in arrays)
    untrained = [path for path, trained in is_trained.items() if not trained]
    if untrained and any(is_trained.values()):
        _LOG.warning(
            "%slora_a or lora_b is still zero in some adapters, while others are trained. An "
            "adapter has no effect if the model reads the weight itself and never calls its layer: "
            "adapt such weights by apply_dora(..., example=) with inputs for the model. The "
            "adapters are:%s",
            prefix,
            listing(untrained),
        )


def _without_dropout(adapter: Adapter) -> Adapter:
    rules = tuple(dataclasses.replace(rule, dropout=0.0) for rule in adapter.rules)
    return dataclasses.replace(adapter, rules=rules)


def _merge_layer(
    path: str, base: Any, sources: list[DoRALayer | WeightAdapter], requantize: bool, report: bool
) -> MergedLayer | None:
    """Merges a kernel of `base`, and returns its entry of the report, or None without `report`."""
    parameter = getattr(base, sources[0].kernel_name)
    kernel = parameter.get_value()
    with named_in_errors(path, "merged"):
        check_kernel(kernel, sources[0].contraction, sources[0].stack)
    change: Any = functools.reduce(weight_change, sources, None)
    merged = add_change(kernel, change)
    if quantised.is_quantised(kernel) and requantize:
        if not isinstance(sources[0], DoRALayer):
            raise ValueError(
                f"{path!r} cannot be merged: requantize is True, and the code of its module reads "
                "the kernel, which must be an array without an adapter; expected False"
            )
        exact = quantised.dense(kernel, change.dtype) + change
        tile = tuple(n // m for n, m in zip(kernel.shape, kernel.scale.shape, strict=True))
        merged = round_to(exact, quantised.qtype_name(kernel), tile, kernel.scale.dtype)
    elif quantised.is_quantised(kernel):
        compute_plain(base)
    with named_in_errors(path, "merged"):
        if quantised.is_quantised(merged):
            check.rounded("its merged kernel", merged)
        set_and_verify(parameter, merged)
    return report_entry(path, kernel, change, merged) if report else None


def add_change(kernel: jax.Array, change: jax.Array) -> jax.Array:
    """Returns kernel + change, cast once: to the kernel's dtype, or bf16 for a quantised one."""
    dtype = jnp.bfloat16 if quantised.is_quantised(kernel) else kernel.dtype
    return (quantised.dense(kernel, change.dtype) + change).astype(dtype)


def report_entry(path: str, kernel: jax.Array, change: jax.Array, merged: Any) -> MergedLayer:
    """Measures how far `merged` is from the exact sum of the kernel of the layer at `path` and its
    change. `merged` is the result of `add_change`, or a quantised kernel."""
    before = quantised.dense(kernel, change.dtype)
    exact = before + change
    error = quantised.dense(merged, change.dtype) - exact
    arrays = {"weight": before, "merged": exact, "change": change, "error": error}
    is_quantised = quantised.is_quantised(merged)
    return MergedLayer.from_norms(
        path,
        quantised.qtype_name(merged) if is_quantised else str(merged.dtype),
        **{name: float(jnp.linalg.norm(array)) for name, array in arrays.items()},
        # XLA's maximum of NaN and numbers is a number on some CPUs.
        max_abs=float(jnp.where(jnp.isnan(error).any(), jnp.nan, jnp.abs(error).max(initial=0))),
    )


def weight_change(before: jax.Array | None, layer: DoRALayer | WeightAdapter) -> jax.Array:
    """Returns W' - W in the kernel's shape after merging `layer`, given W' - W of the adapters
    merged before it."""
    parameters = {name: getattr(layer, name)[...] for name in ADAPTER_NAMES}
    parameters["kernel"] = layer.kernel_param[...]
    if before is not None:
        parameters["before"] = before
    return layer.stack.map(_layer_change, parameters, Setting.of(layer))


class Setting(NamedTuple):
    """The settings that determine the change of a kernel: `contraction`, `scale` and
    `result_dtype` of a single DoRA layer, without stack axes."""

    contraction: Contraction
    scale: float
    dtype: Any

    @classmethod
    def of(cls, layer: Any) -> Self:
        check_rank(layer)
        return cls(layer.contraction, layer.scale, layer.result_dtype)


def kernel_change(setting: Setting, **parameters: jax.Array) -> jax.Array:
    """Returns W' - W in the kernel's shape, in fp32 (fp64 if a parameter is fp64), from kernel,
    lora_a, lora_b and magnitude with leading stack axes, and before, W' - W of adapters that are
    merged already."""
    kernel = parameters["kernel"]
    stack = Stack(kernel.shape[: kernel.ndim - len(setting.contraction.kernel.stored)])
    return stack.map(_layer_change, parameters, setting)


@functools.partial(jax.jit, static_argnums=1)
def _layer_change(parameters: Mapping[str, jax.Array], setting: Setting) -> jax.Array:
    """Returns `kernel_change` of a single layer."""
    change = functools.partial(_change_of_matrices, setting)
    kernel = quantised.stored(parameters["kernel"])
    spec = functools.partial(meshes.spec, kernel)
    return meshes.on_explicit_axes(change, spec, kernel)(parameters)


def _change_of_matrices(setting: Setting, parameters: Mapping[str, jax.Array]) -> jax.Array:
    contraction = setting.contraction
    # [n, in, out], [n, in, r], [n, r, out] and [n, 1, out]
    names = ("kernel", "lora_a", "lora_b", "magnitude")
    kernel, lora_a, lora_b, magnitude = contraction.matrices(
        **{name: parameters[name] for name in names}
    ).values()
    norm = bounded_norm(matrix_norm(kernel, lora_a, lora_b, setting.scale), setting.dtype)
    g = ops.magnitude_scale(magnitude.reshape(-1), norm.reshape(-1), setting.dtype)
    dtype = norm.dtype
    g = g.astype(dtype).reshape(magnitude.shape)
    change = setting.scale * jnp.matmul(
        lora_a.astype(dtype), lora_b.astype(dtype), precision=lax.Precision.HIGHEST
    )
    if "before" in parameters:
        change = change + contraction.kernel.to_matrices(parameters["before"])
    change = (g - 1) * quantised.dense(kernel, dtype) + g * change
    return contraction.kernel.from_matrices(change)
