"""Lists the weights of a model as `AdaptableWeight`s.

A weight is known by its module's class, by `jax_dora.register`, or by the operations that read it.
"""

from typing import Any

import jax
from flax import nnx

from dora_common.rules import OUTPUT_HEADS
from jax_dora.adapt.adapted_class import adapter_of, at_path, has_dora_type, own_methods
from jax_dora.adapt.bridge import LinenModule
from jax_dora.adapt.nested_weights import nested_weights, paths_within, with_linen_refusals
from jax_dora.adapt.reads import (
    find_output_heads,
    has_adapted_form,
    reader_of,
    weights_of,
)
from jax_dora.adapt.tree import Modules, by_path, find_modules
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.adapt.weight_adapter import WeightAdapter
from jax_dora.layers import DoRALayer, dora_class_of
from jax_dora.layers.base_layer import adaptation_hint, computes_like, is_node
from jax_dora.layers.stack import STACK_LETTERS, stack_axes_of
from jax_dora.ops import quantised
from jax_dora.tracing.read_log import Read, ReadLog
from jax_dora.tracing.registry import Registration, class_name, registrations, why_unknown

LINEN_REFUSAL = "a linen module's, known only by a call with inputs"
REMEDY = "name the contracted axes by jax_dora.register, or pass inputs for the model as example="

# These modules overwrite the parameters of the module in `layer_instance`, adapters included, in
# every call.
_PARAMETER_WRITERS = (nnx.WeightNorm, nnx.SpectralNorm)


def find_weights(
    model: nnx.Module | Modules, reads: ReadLog | None = None, *, is_leading: bool = False
) -> list[AdaptableWeight]:
    """Returns every weight of a model, and every other module that holds parameters, in the order
    of the paths. `model` may be its modules from `find_modules`; `reads` are those of a call of the
    model, or None; for `is_leading` see `AdaptableWeight`."""
    found = model if isinstance(model, dict) else find_modules(model)
    modules = by_path(found)
    weights = []
    for paths, module in found.items():
        # What a description of each weight of the module has in common.
        one = AdaptableWeight(paths, paths, "", is_leading=is_leading, modules=modules)
        weights += _weights_of_module(one, module, found, reads)
    mark_experts_and_heads(weights, reads)
    _reject_overwritten(weights, found)
    if reads is None:
        _reject_linen(weights, found)
    return weights


def mark_experts_and_heads(weights: list[AdaptableWeight], reads: ReadLog | None) -> None:
    """Changes in `weights` what the reads of all of them show together.

    The first axis of a weight that a call has shown is a batch axis ("b") if another weight of the
    same module has a batch axis of that size there: an einsum over all experts, `td,edf->etf`,
    looks like an einsum over heads. And "all-linear" does not select the output head.
    """
    experts = {(one.module_paths, one.shape[0]) for one in weights if one.axes[:1] == "b"}
    for number, one in enumerate(weights):
        has_experts = one.shape and (one.module_paths, one.shape[0]) in experts
        axes = f"b{one.axes[1:]}"
        if has_experts and one.how.startswith("read by a product") and {"i", "o"} <= {*axes}:
            weights[number] = one.replace(axes=axes, how=f"read by a product, {axes}")
    for path, param in find_output_heads(reads):
        for number, one in enumerate(weights):
            if one.param == param and path in one.module_paths:
                head = one.replace(is_linear=False, how=f"{one.how}, the output head")
                weights[number] = head


def _reject_overwritten(weights: list[AdaptableWeight], found: Modules) -> None:
    """Marks `weights` as not adaptable where another module overwrites them in every call."""
    for paths, writer in found.items():
        if isinstance(writer, _PARAMETER_WRITERS):
            prefixes = paths_within(paths, "layer_instance/")
            refusal = f"{class_name(type(writer))} overwrites it in every call"
            for number, one in enumerate(weights):
                if any(f"{path}/".startswith(prefixes) for path in one.module_paths):
                    changes: Any = {"is_layer": False, "is_linear": False, "refusal": refusal}
                    weights[number] = one.replace(**changes)


def _reject_linen(weights: list[AdaptableWeight], found: Modules) -> None:
    """Marks `weights` of linen modules as not adaptable: no call has shown what reads them."""
    for paths, module in found.items():
        if isinstance(module, LinenModule):
            prefixes = paths_within(paths, "")
            for number, one in enumerate(weights):
                is_inside = any(f"{path}/".lstrip("/").startswith(prefixes) for path in one.paths)
                if is_inside and one.param and not one.is_adapted:
                    weights[number] = one.replace(is_linear=False, refusal=LINEN_REFUSAL)


def _weights_of_module(
    one: AdaptableWeight, module: Any, found: Modules, reads: ReadLog | None
) -> list[AdaptableWeight]:
    """Returns the weights of one module, which `one` is without weights; or the module itself if it
    has parameters but no weights."""
    kind = type(module) if isinstance(module, DoRALayer) else dora_class_of(module)
    registered = registrations(module)
    params = list(weights_of(module))
    main = [kind.kernel_name] if kind else list(registered) or params
    weights = []
    for param in dict.fromkeys([*main, *params]):
        paths, own_paths = one.module_paths, paths_within(one.module_paths, param)
        if param not in main:
            paths = own_paths
        elif kind is None and (len(main) > 1 or "" in paths):
            paths = own_paths + paths
        shape = tuple(getattr(module, param).shape)
        weight = one.replace(paths=paths, param=param, shape=shape)
        of_weight = _reads_of(reads, weight)
        if weight.is_parameter:
            weight = _described(weight, kind, registered.get(param), of_weight, found)
        else:
            weight = weight.replace(
                refusal=weight.why_no_parameter(),
                # "all-linear" selects it, so that the refusal is raised.
                is_linear=kind.is_linear(module) if kind else registered[param].linear,
            )
        is_unread = kind is None and of_weight == ()
        weights.append(
            weight.replace(
                is_linear=weight.is_linear and paths[0].rpartition("/")[2] not in OUTPUT_HEADS,
                is_matched=param in main or not weight.refusal or is_unread,
            )
        )
    weights += nested_weights(one, module)
    if isinstance(module, nnx.bridge.ToNNX):
        weights = with_linen_refusals(module, weights)
    leaves = jax.tree.leaves(vars(module), is_leaf=is_node)
    if not weights and any(isinstance(leaf, nnx.Param) for leaf in leaves):
        weights.append(one.replace(refusal="it has no weight of two axes"))
    return weights


def _described(
    weight: AdaptableWeight,
    kind: type[DoRALayer] | None,
    registration: Registration | None,
    reads: tuple[Read, ...] | None,
    found: Modules,
) -> AdaptableWeight:
    """Returns the weight with whether and how it is adapted or can be: by `kind`, the class that
    adapts the module as a layer; by its registration; or by the operations that read it (None: no
    call was traced)."""
    module = weight.module
    module_type = type(module)
    is_kernel = kind is not None and weight.param == kind.kernel_name
    # A subclass with its own __call__ may compute something else, so "all-linear" skips it.
    is_plain = kind is not None and computes_like(module_type, kind.base_type)
    hint, adapter = adaptation_hint(module), adapter_of(weight)
    is_read_outside = any(not read.scopes.intersection(weight.module_paths) for read in reads or ())
    # A DoRA layer has neither the class nor the own methods of a subclass; a weight's module does.
    base_type = kind.base_type if kind else module_type
    keeps_class = (registration is not None and module_type is not base_type) or (
        reads is not None and own_methods(module_type) != own_methods(base_type)
    )
    if isinstance(module, DoRALayer) and is_kernel:
        note = ", read without its adapter outside of its calls: pass example="
        return weight.replace(
            axes="".join(module.stack.combine(STACK_LETTERS, module.kernel_axes(module))),
            is_layer=True,
            is_adapted=True,
            is_linear=module.is_linear(module),
            how=class_name(module.plain_type) + (note if is_read_outside else ""),
        )
    if isinstance(adapter, WeightAdapter):
        readers = _readers(weight, found) or {weight.module_paths: ()}
        paths, inside = next(iter(readers.items()))
        reader_paths = {*weight.module_paths}.union(*readers)
        note = ", read without its adapter by others: call these too in example="
        is_read_by_others = any(not read.scopes & reader_paths for read in reads or ())
        return weight.replace(
            axes=adapter.weight.axes,
            reader=(paths[0], inside),
            is_adapted=True,
            is_linear=True,
            is_lookup=adapter.weight.is_lookup,
            how="read by its module's methods" + (note if is_read_by_others else ""),
        )
    if kind and is_kernel and (hint or not (keeps_class or is_read_outside)):
        plain_type = module.plain_type if has_dora_type(module) else type(module)
        refusal = "no operation of this call reads it" if reads == () else ""
        if not is_plain:
            refusal = (
                f"a {type(module).__name__}, which computes something else than "
                f"nnx.{kind.base_type.__name__}: {hint or 'pass example='}"
            )
        return weight.replace(
            axes=_stacked_read(reads),
            is_layer=True,
            is_linear=is_plain and kind.is_linear(module),
            refusal=refusal,
            how=class_name(plain_type),
        )
    if registration is not None or reads is not None:
        return described_by_reads(weight, registration, reads)
    if kind is None:
        return weight.replace(refusal=why_unknown(module))
    return weight.replace(refusal=f"only the {kind.kernel_name} of its layer can be adapted")


def _readers(weight: AdaptableWeight, found: Modules) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Returns the paths of each module whose methods trace an adapted weight, and the path from
    that module to the weight's."""
    return {
        paths: inside
        for paths, module in found.items()
        if has_dora_type(module)
        for inside, param in module.dora_reads
        if param == weight.param and at_path(module, inside) is weight.module
    }


def _reads_of(reads: ReadLog | None, weight: AdaptableWeight) -> tuple[Read, ...] | None:
    """Returns the reads of a weight; None if no call was traced."""
    if reads is None:
        return None
    keys = ((path, weight.param) for path in weight.module_paths)
    return next((reads.reads[key] for key in keys if key in reads.reads), ())


def described_by_reads(
    weight: AdaptableWeight, registration: Registration | None, reads: tuple[Read, ...] | None
) -> AdaptableWeight:
    """Returns the weight as its registration, its reads, or both describe it."""
    stack_axes = stack_axes_of(_stacked_read(reads)) or None
    axes = registration.axes_of(weight.module, stack_axes) if registration else None
    if reads is None:
        assert registration is not None
        return weight.replace(
            axes=axes or "",
            reader=(weight.module_paths[0], ()),
            is_linear=registration.linear,
            is_lookup=not registration.linear,
            how=f"registered, {axes}",
            refusal="" if axes else "its registration has no axes for this module",
        )
    if not reads:
        return weight.replace(refusal="no operation of this call reads it")
    useful = [read for read in reads if read.kind != "other"]
    if axes is None:
        lookups = [read for read in useful if read.kind == "lookup"]
        chosen = next(iter(lookups or useful), None)
        if chosen is None:
            others = sorted({read.name for read in reads})
            return weight.replace(refusal=f"no product reads it, only {', '.join(others)}")
        if missing := {"i", "o"}.difference(chosen.axes):
            reason = "keeps none of its axes" if "o" in missing else "contracts none of its axes"
            refusal = f"the product that reads it, {chosen.axes}, {reason}"
            return weight.replace(refusal=refusal)
        axes = chosen.axes
    looked_up = any(read.kind == "lookup" and has_adapted_form(read, axes) for read in useful)
    how = f"{'registered' if registration else 'read by a product'}, {axes}"
    if looked_up:
        is_tied = any(read.kind == "product" for read in useful)
        how = f"looked up{' and tied to a product' if is_tied else ''}, {axes}"
    reader = reader_of(weight, reads)
    refusal = ""
    if quantised.is_quantised(weight.parameter.get_value()):
        refusal = (
            "it is quantised, and code other than its layer's own call reads it: narrow the path "
            "of quantize so that it does not match this layer"
        )
    elif isinstance(weight.module, nnx.List):
        refusal = "it is inside an nnx.List: make it an attribute of a module"
    elif reader is None:
        refusal = "it is read outside of the methods of the modules that contain it"
    return weight.replace(
        axes=axes,
        reader=reader,
        is_linear=registration.linear if registration else not looked_up,
        is_lookup=looked_up or bool(registration and not registration.linear),
        merged=sum(not has_adapted_form(read, axes) for read in reads),
        how=how,
        refusal=refusal,
    )


def _stacked_read(reads: tuple[Read, ...] | None) -> str:
    """Returns the axes of a read if all reads agree on stack axes, and there are any; else ""."""
    found = {stack_axes_of(read.axes): read.axes for read in reads or () if read.kind != "other"}
    [(stack_axes, axes)] = found.items() if len(found) == 1 else [((), "")]
    return axes if stack_axes else ""
