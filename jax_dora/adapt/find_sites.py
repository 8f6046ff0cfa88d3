"""Lists the weights of a model as `Site`s.

A weight is known by its module's class, by `jax_dora.register`, or by the operations that read it.
"""

from typing import Any

import jax
from flax import nnx

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import OUTPUT_HEADS
from jax_dora.adapt.bridge import LinenModule
from jax_dora.adapt.site import Site
from jax_dora.adapt.trace_reads import (
    find_output_heads,
    has_adapted_form,
    is_weight,
    reader_of,
    weights_of,
)
from jax_dora.adapt.tree import FoundModule, find_modules, nested_leaves
from jax_dora.layers import DORA_CLASSES, DoRALayer, dora_class_of
from jax_dora.layers.base_layer import adaptation_hint, computes_like, is_node
from jax_dora.layers.stack import stack_axes_of
from jax_dora.ops import quantised
from jax_dora.tracing.adapted_class import at_path, has_dora_type, own_methods
from jax_dora.tracing.read_log import Read, ReadLog
from jax_dora.tracing.registry import Registration, class_name, registrations, why_unknown
from jax_dora.tracing.weight_adapter import WeightAdapter

LINEN_REFUSAL = "a linen module's, known only by a call with inputs"
REMEDY = "name the contracted axes by jax_dora.register, or pass inputs for the model as example="


# These modules overwrite the parameters of the module in `layer_instance`, adapters included, in
# every call.
_PARAMETER_WRITERS = (nnx.WeightNorm, nnx.SpectralNorm)


def find_sites(
    model: nnx.Module,
    traced: ReadLog | None = None,
    *,
    stack_axes: tuple[int, ...] | None = None,
) -> list[Site]:
    """Returns every weight of a model, and every other module that holds parameters itself, in the
    order of the paths.

    Args:
      traced: the reads of a call of the model; None if only the modules' classes are known.
      stack_axes: the argument `axes` of `infer_stack`, for layers whose stack axes the call does
        not show.
    """
    modules = find_modules(model)
    sites = [site for module in modules for site in _sites_of(module, modules, traced)]
    for site in sites:
        site.stack_axes = stack_axes if site.stack_axes is None else site.stack_axes
    _mark_expert_axes(sites)
    _reject_overwritten(sites, modules)
    if traced is None:
        _reject_linen(sites, modules)
    for path, param in find_output_heads(traced):
        for site in sites:
            if site.param == param and path in site.found.paths:
                site.is_linear = False
                site.how += ", the output head"
    return sites


def _mark_expert_axes(sites: list[Site]) -> None:
    """Marks the first axis of a traced weight as a batch axis ("b"), if another weight of the same
    module has a batch axis of that size there. An einsum over all experts, `td,edf->etf`, looks
    like an einsum over heads."""
    experts = {(id(site.found.module), site.shape[0]) for site in sites if site.axes[:1] == "b"}
    for site in sites:
        has_experts = site.shape and (id(site.found.module), site.shape[0]) in experts
        rest = site.axes[1:]
        if has_experts and site.how.startswith("read by") and {"i", "o"} <= set(rest):
            site.axes = f"b{rest}"
            site.how = f"read by a product, {site.axes}"


def _reject_overwritten(sites: list[Site], modules: list[FoundModule]) -> None:
    """Marks weights as not adaptable if another module overwrites them in every call."""
    for writer in (found for found in modules if isinstance(found.module, _PARAMETER_WRITERS)):
        prefixes = _paths_within(writer, "layer_instance/")
        for site in sites:
            if any(f"{path}/".startswith(prefixes) for path in site.found.paths):
                site.is_layer = site.is_linear = False
                site.refusal = f"{class_name(type(writer.module))} overwrites it in every call"


def _reject_linen(sites: list[Site], modules: list[FoundModule]) -> None:
    """Marks weights of linen modules as not adaptable unless a call has shown what reads them."""
    for module in (found for found in modules if isinstance(found.module, LinenModule)):
        prefixes = _paths_within(module, "")
        for site in sites:
            is_inside = any(f"{path}/".lstrip("/").startswith(prefixes) for path in site.names)
            if is_inside and site.param and not site.is_adapted:
                site.is_linear = False
                site.refusal = LINEN_REFUSAL


def _sites_of(found: FoundModule, modules: list[FoundModule], traced: ReadLog | None) -> list[Site]:
    """Returns the sites of one module: its weights, or the module itself if it has parameters but
    no weights."""
    module = found.module
    kind = type(module) if isinstance(module, DoRALayer) else dora_class_of(module)
    registered = registrations(module)
    params = list(weights_of(module))
    main = [kind.kernel_name] if kind else list(registered) or params
    sites = []
    for param in dict.fromkeys([*main, *params]):
        names, own_names = found.paths, _paths_within(found, param)
        if param not in main:
            names = own_names
        elif kind is None and (len(main) > 1 or "" in names):
            names = own_names + names
        site = Site(names, found, param)
        reads = _reads_of(traced, found, param)
        if site.is_parameter:
            _describe(site, kind, registered.get(param), reads, modules)
        else:
            site.refusal = site.why_no_parameter()
            # "all-linear" selects it, so that the refusal is raised.
            site.is_linear = kind.is_linear(module) if kind else registered[param].linear
        site.is_linear = site.is_linear and site.names[0].rpartition("/")[2] not in OUTPUT_HEADS
        is_unread = kind is None and reads == ()
        site.is_matched = param in main or not site.refusal or is_unread
        sites.append(site)
    sites += _nested_sites(found)
    if isinstance(module, nnx.bridge.ToNNX):
        sites = _mark_unopened_sites(module, sites)
    leaves = jax.tree.leaves(vars(module), is_leaf=is_node)
    if not sites and any(isinstance(leaf, nnx.Param) for leaf in leaves):
        sites.append(Site(found.paths, found, "", refusal="it has no weight of two axes"))
    return sites


def _describe(
    site: Site,
    kind: type[DoRALayer] | None,
    registration: Registration | None,
    reads: tuple[Read, ...] | None,
    modules: list[FoundModule],
) -> None:
    """Sets whether and how a weight is adapted or can be adapted.

    Args:
      kind: the class that adapts the module as a layer, if any.
      registration: the weight's registration, if any.
      reads: the operations that read the weight; None if no call was traced.
    """
    module: Any = site.found.module
    module_type = type(module)
    is_kernel = kind is not None and site.param == kind.kernel_name
    # A subclass with its own __call__ may compute something else, so "all-linear" skips it.
    is_plain = kind is not None and computes_like(module_type, kind.base_type)
    hint = adaptation_hint(module)
    is_read_outside = any(not read.scopes.intersection(site.found.paths) for read in reads or ())
    # A DoRA layer has neither the class nor the own methods of a subclass; a weight's module does.
    base_type = kind.base_type if kind else module_type
    keeps_class = (registration is not None and module_type is not base_type) or (
        reads is not None and own_methods(module_type) != own_methods(base_type)
    )
    if isinstance(module, DoRALayer) and is_kernel:
        site.is_layer, site.is_adapted = True, True
        site.how, site.is_linear = class_name(module.plain_type), module.is_linear(module)
        if is_read_outside:
            site.how += ", read without its adapter outside of its calls: pass example="
    elif isinstance(site.adapter, WeightAdapter):
        spec = site.adapter.spec
        site.is_adapted, site.axes, site.is_lookup = True, spec.axes, spec.is_lookup
        site.is_linear = True
        site.how = "read by its module's methods"
        reader_paths = _paths_of_readers(site, modules)
        if any(not read.scopes.intersection(reader_paths) for read in reads or ()):
            site.how += ", read without its adapter by others: call these too in example="
    elif kind and is_kernel and (hint or not (keeps_class or is_read_outside)):
        plain_type = module.plain_type if has_dora_type(module) else type(module)
        site.is_layer, site.how = True, class_name(plain_type)
        site.is_linear = is_plain and kind.is_linear(module)
        site.stack_axes = _stack_axes(reads)
        if not is_plain:
            site.refusal = (
                f"a {type(module).__name__}, which computes something else than "
                f"nnx.{kind.base_type.__name__}: {hint or 'pass example='}"
            )
        elif reads == ():
            site.refusal = "no operation of this call reads it"
    elif registration is not None or reads is not None:
        _describe_from_reads(site, registration, modules, reads)
    elif kind is None:
        site.refusal = why_unknown(module)
    else:
        site.refusal = f"only the {kind.kernel_name} of its layer can be adapted"


def _paths_of_readers(site: Site, modules: list[FoundModule]) -> set[str]:
    """Returns the paths of the modules whose methods trace an adapted weight."""
    paths = set(site.found.paths)
    for found in modules:
        if has_dora_type(found.module) and any(
            param == site.param and at_path(found.module, path) is site.found.module
            for path, param in found.module.dora_reads
        ):
            paths.update(found.paths)
    return paths


def _paths_within(found: FoundModule, name: str) -> tuple[str, ...]:
    """Returns the paths of the attribute `name` of a module."""
    return tuple(f"{path}/{name}".lstrip("/") for path in found.paths)


def _mark_unopened_sites(module: nnx.Module, sites: list[Site]) -> list[Site]:
    """Marks the weights of a linen module that are in plain dicts as not adaptable. Returns the
    sites without the arrays of the linen module's own adapters.

    They are in plain dicts if it has such adapters, if its `ToNNX` is of a subclass, or if one of
    its modules has a name that `nnx.Dict` needs.
    """
    if isinstance(module, LinenModule):
        for site in sites:
            if site.nested_param is not None:
                site.refusal = (
                    "a linen module's, inside a module whose name nnx.Dict needs: rename it"
                )
        return sites
    names = {
        "/".join((name, *keys))
        for name, value in vars(module).items()
        for keys, _ in [((), value), *nested_leaves(value)]
    }
    kernels = {cls.kernel_name for cls in DORA_CLASSES.values()}
    adapters: set[str] = set()
    for site in sites:
        site.is_linear = False
        site.refusal = "a linen module's, which nothing adapts inside nnx"
        prefixes = [f"{site.param}_"]
        if site.param.rpartition("/")[2] in kernels:
            prefixes.append(site.param.removesuffix(site.param.rpartition("/")[2]))
        for prefix in prefixes:
            adapter = {f"{prefix}{name}" for name in ADAPTER_NAMES}
            if adapter <= names:
                adapters |= adapter
                site.is_adapted = True
                site.refusal = site.how = "a linen module's, by jax_dora.linen.apply_dora"
    return [site for site in sites if site.param not in adapters]


def _nested_sites(found: FoundModule) -> list[Site]:
    """Returns the weights in plain lists, tuples and dicts of a module or of its parameters. They
    cannot be adapted."""
    sites = []
    for name, value in vars(found.module).items():
        refusal = "it is inside a list, tuple or dict: make it an attribute of a module"
        leaves = nested_leaves(value)
        if isinstance(value, nnx.Param) and not hasattr(value, "ndim"):
            refusal = "its parameter holds several arrays: make each a separate parameter"
            leaves = ((keys, type(value)(leaf)) for keys, leaf in nested_leaves(value.get_value()))
        elif isinstance(value, nnx.Variable) and _framework(value) == "keras":
            refusal = "it is a variable of Keras, no nnx.Param: write the module in nnx"
            leaves = [((), nnx.Param(value.get_value()))]
        elif arrays := _foreign_arrays(value):
            kind = class_name(type(value))
            refusal = f"it is inside a {kind}, which is no nnx module: write the module in nnx"
            leaves = ((keys, nnx.Param(array)) for keys, array in arrays)
        for keys, weight in leaves:
            if is_weight(weight):
                param = "/".join((name, *keys))
                paths = _paths_within(found, param)
                sites.append(Site(paths, found, param, refusal=refusal, nested_param=weight))
    return sites


def _framework(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _foreign_arrays(value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns (keys, array) for every array in a module of another framework: Equinox's modules are
    pytrees, and Keras' layers list their `weights`."""
    framework = _framework(value)
    if is_node(value) or isinstance(value, list | tuple | dict | jax.Array) or framework == "qwix":
        return []
    if framework == "keras":
        weights = enumerate(getattr(value, "weights", ()))
        arrays = [((getattr(w, "name", str(n)),), w) for n, w in weights]
    else:
        leaves = jax.tree_util.tree_leaves_with_path(value)
        arrays = [((jax.tree_util.keystr(path).strip("."),), leaf) for path, leaf in leaves if path]
    found = ((keys, getattr(leaf, "value", leaf)) for keys, leaf in arrays)
    return [(keys, array) for keys, array in found if isinstance(array, jax.Array)]


def _reads_of(traced: ReadLog | None, found: FoundModule, param: str) -> tuple[Read, ...] | None:
    """Returns the reads of a parameter; None if no call was traced."""
    if traced is None:
        return None
    return next(
        (traced.reads[path, param] for path in found.paths if (path, param) in traced.reads), ()
    )


def _describe_from_reads(
    site: Site,
    registration: Registration | None,
    modules: list[FoundModule],
    reads: tuple[Read, ...] | None,
) -> None:
    """Describes a weight by its registration, by its reads, or by both."""
    module = site.found.module
    axes = registration.axes_of(module, _stack_axes(reads)) if registration else None
    if reads is None:
        assert registration is not None
        site.axes, site.reader = axes or "", (module, ())
        site.is_linear = registration.linear
        site.is_lookup = not registration.linear
        site.how = f"registered, {axes}"
        if not axes:
            site.refusal = "its registration has no axes for this module"
        return
    if not reads:
        site.refusal = "no operation of this call reads it"
        return
    useful = [read for read in reads if read.kind != "other"]
    if axes is None:
        lookups = [read for read in useful if read.kind == "lookup"]
        chosen = next(iter(lookups or useful), None)
        if chosen is None:
            others = sorted({read.name for read in reads})
            site.refusal = f"no product reads it, only {', '.join(others)}"
            return
        if missing := {"i", "o"}.difference(chosen.axes):
            reason = "keeps none of its axes" if "o" in missing else "contracts none of its axes"
            site.refusal = f"the product that reads it, {chosen.axes}, {reason}"
            return
        axes = chosen.axes
    site.axes = axes
    looked_up = any(read.kind == "lookup" and has_adapted_form(read, axes) for read in useful)
    site.is_lookup = looked_up or bool(registration and not registration.linear)
    site.is_linear = registration.linear if registration else not looked_up
    site.merged = sum(not has_adapted_form(read, axes) for read in reads)
    site.how = f"{'registered' if registration else 'read by a product'}, {axes}"
    if looked_up:
        site.how = f"looked up, {axes}"
        if any(read.kind == "product" for read in useful):
            site.how = f"looked up and tied to a product, {axes}"
    site.reader = reader_of(site.found, modules, reads)
    if quantised.is_quantised(site.parameter.get_value()):
        site.refusal = (
            "it is quantised, and code other than its layer's own call reads it: narrow the path "
            "of quantize so that it does not match this layer"
        )
    elif isinstance(module, nnx.List):
        site.refusal = "it is inside an nnx.List: make it an attribute of a module"
    elif site.reader is None:
        site.refusal = "it is read outside of the methods of the modules that contain it"


def _stack_axes(reads: tuple[Read, ...] | None) -> tuple[int, ...] | None:
    """Returns the `Stack.axes` that all reads agree on; None if they do not, or show no stack."""
    found = {stack_axes_of(read.axes) for read in reads or () if read.kind != "other"}
    return (found.pop() or None) if len(found) == 1 else None
