"""Adapters into the weights: plain layers, merged in fp32 and cast once."""

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
from dora_common.rules import listing
from jax_dora import ops
from jax_dora.adapt.adapter import Adapter, set_adapter
from jax_dora.adapt.tree import (
    Found,
    check_model,
    find_dora_layers,
    find_modules,
    named_in_errors,
    remove_dora,
    shared_variables,
)
from jax_dora.layers import DoRALayer
from jax_dora.layers.base_layer import set_as_read
from jax_dora.layers.call import bounded_norm, matrix_norm
from jax_dora.layers.layout import Layout
from jax_dora.layers.quantised import compute_plain
from jax_dora.layers.stack import Stack
from jax_dora.ops import mesh as meshes
from jax_dora.ops import quantised
from jax_dora.ops.rounding import round_to
from jax_dora.weights.adapter import WeightAdapter

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
    """Returns `model` as a plain model, with every adapter in its layer's kernel.

    The kernel becomes W' = W + ((g-1)∘W + g∘(s·lora_a lora_b)), evaluated in fp32 and cast once to
    the kernel's dtype. In bf16 that cast can cost more than a small adapter does: `return_report`
    says. `model` is left as it is, and is the way back; nothing is ever divided out again.

    A quantised kernel becomes a bf16 one: rounded to the steps of its format again, it can lose all
    that the adapter changed. `requantize` does so nevertheless, and then `return_report` is due.

    A merged embedding is one array for every use of it: an output head that is tied to it is
    adapted from then on even where `adapt_attend` was False (as by PEFT's merging). Untie it first,
    or set `adapt_attend`, where that matters.

    Of layers that share a parameter each has an adapter of its own, and gets an array of its own:
    whatever else refers to the parameter keeps the base's, as in `model`.

    Logs a warning of adapters that are as they were made while others have moved.

    Args:
      model: a model with an adapter; dropout plays no part.
      adapters: merges these into the base of `model` instead of the adapter that it holds: several
        in turn, as PEFT does since 0.21. After each, W' becomes g∘(W' + s·lora_a lora_b), where g
        is its magnitude by its norm over the base W alone; so each scales what was merged before
        it, and the order matters. The cast to the kernel's dtype comes once, after the last.
      requantize: of a quantised kernel return one of the same format and tiles, not a bf16 one.
      return_report: return a `MergeReport` too.

    Returns:
      The merged model, or that and the report.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: there is no adapter to merge, or one of `adapters` does not fit the model; or
        `requantize` without `return_report`.
      NotImplementedError: a kernel's variable returns another value than was set.
    """
    if requantize and not return_report:
        raise ValueError(
            "requantize is True and return_report False; expected both: rounded to the format's "
            "steps an adapter can be lost, and the report says how much of it is, layer by layer"
        )
    if adapters is not None and not isinstance(adapters, Sequence):
        raise TypeError(
            f"adapters is a {type(adapters).__name__}; expected a list of Adapters, or None"
        )
    check_model(model, for_linen="jax_dora.linen.merge_dora")
    merged = remove_dora(model)
    models = [model]
    if adapters is not None:
        models = [set_adapter(merged, _without_dropout(adapter)) for adapter in adapters]
    sources: dict[str, list[DoRALayer | WeightAdapter]] = {}
    for number, one in enumerate(models):
        in_one = find_dora_layers(one)
        _warn_of_untrained(in_one, "" if adapters is None else f"adapters[{number}]: ")
        for found in in_one:
            # By every path: of a shared layer's, a copy of the model may hold another first.
            for path in found.paths:
                sources.setdefault(path, []).append(found.module)
    if not sources:
        raise ValueError(
            "model holds no adapter and adapters names none; expected a model from apply_dora"
        )
    layers, shared, done = [], shared_variables(merged), set()
    bases = {path: found.module for found in find_modules(merged) for path in found.paths}
    for path, its in sources.items():
        adapter, name = its[0], its[0].kernel_name
        base = bases[adapter.module_path(path) if isinstance(adapter, WeightAdapter) else path]
        if (id(base), name) in done:
            continue
        done.add((id(base), name))
        # Whether it counts in its own module's methods alone, wherever else the parameter is read.
        is_own = isinstance(adapter, DoRALayer) or ((), name) in adapter.module.dora_reads
        if id(getattr(base, name)) in shared and is_own:
            setattr(base, name, getattr(base, name).copy())
        layers.append(_merge_layer(path, base, its, requantize, return_report))
    return (merged, MergeReport(tuple(filter(None, layers)))) if return_report else merged


def _warn_of_untrained(layers: list[Found], of: str) -> None:
    """Warns of adapters that no gradient has reached while others have moved: their model reads
    the weight by itself, and not by the layer.

    Args:
      of: what the warning begins with, to tell several adapters apart.
    """
    has_moved: dict[str, bool] = {}
    for one in layers:
        arrays = (one.module.lora_a[...], one.module.lora_b[...])
        if not any(isinstance(array, Tracer) for array in arrays):
            has_moved[one.paths[0]] = all(bool(jnp.any(array)) for array in arrays)
    still = [path for path, moved in has_moved.items() if not moved]
    if still and any(has_moved.values()):
        _LOG.warning(
            "%slora_a or lora_b is zero, as when they were made, in adapters beside which others "
            "are not; where the model reads a weight by itself, and never calls its layer, the "
            "adapter does nothing: adapt it by apply_dora(..., example=), inputs to call the model "
            "with:%s",
            of,
            listing(still),
        )


def _without_dropout(adapter: Adapter) -> Adapter:
    rules = tuple(dataclasses.replace(rule, dropout=0.0) for rule in adapter.rules)
    return dataclasses.replace(adapter, rules=rules)


def _merge_layer(
    path: str, base: Any, sources: list[DoRALayer | WeightAdapter], requantize: bool, report: bool
) -> MergedLayer | None:
    """Sets the kernel of `base` to the merged one."""
    parameter = getattr(base, sources[0].kernel_name)
    kernel = parameter.get_value()
    change: Any = functools.reduce(_change, sources, None)
    merged = changed(kernel, change)
    if quantised.is_quantised(kernel) and requantize:
        exact = quantised.dense(kernel, change.dtype) + change
        tile = tuple(n // m for n, m in zip(kernel.shape, kernel.scale.shape, strict=True))
        merged = round_to(exact, quantised.qtype_name(kernel), tile, kernel.scale.dtype)
    elif quantised.is_quantised(kernel):
        compute_plain(base)
    with named_in_errors(path, "merged"):
        set_as_read(parameter, merged)
    return reported(path, kernel, change, merged) if report else None


def changed(kernel: jax.Array, change: jax.Array) -> jax.Array:
    """Returns kernel + change, evaluated in the dtype of `change` and cast once to the kernel's, or
    to bf16 where it is quantised."""
    dtype = jnp.bfloat16 if quantised.is_quantised(kernel) else kernel.dtype
    return (quantised.dense(kernel, change.dtype) + change).astype(dtype)


def reported(path: str, kernel: jax.Array, change: jax.Array, merged: Any) -> MergedLayer:
    """Measures how far `merged`, which `changed` returns or a quantised kernel, is from the sum of
    the kernel of the layer at `path` and its change."""
    before = quantised.dense(kernel, change.dtype)
    exact = before + change
    error = quantised.dense(merged, change.dtype) - exact
    measured = {"weight": before, "merged": exact, "change": change, "error": error}
    is_quantised = quantised.is_quantised(merged)
    return MergedLayer.from_norms(
        path,
        quantised.qtype_name(merged) if is_quantised else str(merged.dtype),
        **{name: float(jnp.linalg.norm(one)) for name, one in measured.items()},
        max_abs=float(jnp.max(jnp.abs(error))),
    )


def _change(before: jax.Array | None, layer: DoRALayer | WeightAdapter) -> jax.Array:
    parameters = {name: getattr(layer, name)[...] for name in ADAPTER_NAMES}
    parameters["kernel"] = layer.kernel_param[...]
    if before is not None:
        parameters["before"] = before
    return _change_of_each(layer.stack, Setting.of(layer), parameters)


class Setting(NamedTuple):
    """The settings that a change of a kernel depends on: `layout`, `scale` and `result_dtype` of a
    DoRA layer, without the axes of a stack."""

    layout: Layout
    scale: float
    dtype: Any

    @classmethod
    def of(cls, layer: Any) -> Self:
        return cls(layer.layout, layer.scale, layer.result_dtype)


def kernel_change(setting: Setting, **parameters: jax.Array) -> jax.Array:
    """Returns W' - W in the kernel's shape, in fp32 (fp64 if a parameter is).

    Args:
      setting: the layer's.
      **parameters: kernel, lora_a, lora_b and magnitude, with the axes of a stack in front; and
        before, like the kernel, where W' - W of adapters that were merged before this one is not
        zero.
    """
    kernel = parameters["kernel"]
    stack = Stack(kernel.shape[: kernel.ndim - len(setting.layout.kernel.stored)])
    return _change_of_each(stack, setting, parameters)


def _change_of_each(
    stack: Stack, setting: Setting, parameters: Mapping[str, jax.Array]
) -> jax.Array:
    """Returns the change of a kernel, layer by layer: all parameters are stacked by `stack`."""
    return stack.map(lambda one: _one_change(setting, **one), parameters)


@functools.partial(jax.jit, static_argnums=0)
def _one_change(setting: Setting, **parameters: jax.Array) -> jax.Array:
    """Returns `kernel_change` of a layer that is in no stack."""
    change = functools.partial(_change_of_matrices, setting)
    kernel = quantised.stored(parameters["kernel"])
    if mesh := meshes.explicit(kernel):
        change = meshes.with_auto_axes(change, mesh, jax.P(*meshes.spec(kernel)))
    return change(parameters)


def _change_of_matrices(setting: Setting, parameters: Mapping[str, jax.Array]) -> jax.Array:
    layout = setting.layout
    # [n, in, out], [n, in, r], [n, r, out] and [n, 1, out]
    kernel, lora_a, lora_b, magnitude = (
        axes.to_matrices(parameters[name])
        for name, axes in zip(Layout._fields, layout, strict=True)
    )
    norm = bounded_norm(matrix_norm(kernel, lora_a, lora_b, setting.scale), setting.dtype)
    g = ops.magnitude_scale(magnitude.reshape(-1), norm.reshape(-1), setting.dtype)
    dtype = norm.dtype
    g = g.astype(dtype).reshape(magnitude.shape)
    change = setting.scale * jnp.matmul(
        lora_a.astype(dtype), lora_b.astype(dtype), precision=lax.Precision.HIGHEST
    )
    if "before" in parameters:
        change = change + layout.kernel.to_matrices(parameters["before"])
    change = (g - 1) * quantised.dense(kernel, dtype) + g * change
    return layout.kernel.from_matrices(change)
