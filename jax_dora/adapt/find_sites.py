"""The weights of a model, found in it by their classes or by what reads them."""

from typing import Any

import jax
from flax import nnx

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import OUTPUT_HEADS
from jax_dora.adapt.site import Site
from jax_dora.adapt.trace_reads import (
    find_output_heads,
    has_adapted_form,
    is_weight,
    reader_of,
    weights_of,
)
from jax_dora.adapt.tree import Found, find_modules, nested_leaves
from jax_dora.layers import DORA_CLASSES, DoRALayer, dora_class_of
from jax_dora.layers.base_layer import adaptation_hint, is_node
from jax_dora.ops import quantised
from jax_dora.weights.module import at_path, has_dora_type
from jax_dora.weights.read_log import Read, ReadLog
from jax_dora.weights.registry import Registration, class_name, registrations, why_unknown
from jax_dora.weights.weight_adapter import WeightAdapter

REMEDY = (
    "say which of its axes are contracted by jax_dora.register, or give example=, inputs to call "
    "the model with"
)


# They write the parameters of the module in `layer_instance`, adapters too, in every call.
_PARAMETER_WRITERS = (nnx.WeightNorm, nnx.SpectralNorm)


def find_sites(
    model: nnx.Module, traced: ReadLog | None = None, *, stack_axis: int | None = None
) -> list[Site]:
    """Returns every weight of a model, and every other module that holds parameters itself, in the
    order of the paths.

    Args:
      traced: what a call of the model reads; None where only classes say.
      stack_axis: as `stack_of`'s, of layers of which nothing better is known.
    """
    modules = find_modules(model)
    found = [one for module in modules for one in _sites_of(module, modules, traced)]
    for one in found:
        one.stack_axis = stack_axis if one.stack_axis is None else one.stack_axis
    _mark_expert_axes(found)
    _reject_overwritten(found, modules)
    for head in find_output_heads(traced):
        for one in found:
            if one.param == head[1] and head[0] in one.found.paths:
                one.is_linear = False
                one.how += ", the output head"
    return found


def _mark_expert_axes(found: list[Site]) -> None:
    """Takes the first axis of a traced weight for one that matrices lie along where it is so of
    another weight of its module, as long: an einsum over all experts, `td,edf->etf`, looks like one
    over heads."""
    packed = {(id(site.found.module), site.shape[0]) for site in found if site.axes[:1] == "b"}
    for site in found:
        is_one = site.shape and (id(site.found.module), site.shape[0]) in packed
        rest = site.axes[1:]
        if is_one and site.how.startswith("read by") and {"i", "o"} <= set(rest):
            site.axes = f"b{rest}"
            site.how = f"read by a product, {site.axes}"


def _reject_overwritten(found: list[Site], modules: list[Found]) -> None:
    """Refuses the weights that another module writes in every call."""
    for writer in (one for one in modules if isinstance(one.module, _PARAMETER_WRITERS)):
        written = _paths_within(writer, "layer_instance/")
        for one in found:
            if any(f"{path}/".startswith(written) for path in one.found.paths):
                one.is_layer = one.is_linear = False
                one.refusal = f"{class_name(type(writer.module))} writes it in every call"


def _sites_of(found: Found, modules: list[Found], traced: ReadLog | None) -> list[Site]:
    """Returns the weights of one module, or the module itself where it has parameters and none."""
    module = found.module
    kind = type(module) if isinstance(module, DoRALayer) else dora_class_of(module)
    registered = registrations(module)
    params = list(weights_of(module))
    main = [kind.kernel_name] if kind else list(registered) or params
    made = []
    for param in dict.fromkeys([*main, *params]):
        names, own_names = found.paths, _paths_within(found, param)
        if param not in main:
            names = own_names
        elif kind is None and (len(main) > 1 or "" in names):
            names = own_names + names
        site = Site(names, found, param)
        reads = _reads_of(traced, found, param)
        _describe(site, kind, registered.get(param), reads, modules)
        site.is_linear = site.is_linear and not _is_head(site.names[0])
        is_dead = kind is None and reads == ()
        site.is_matched = param in main or not site.refusal or is_dead
        made.append(site)
    made += _contained_sites(found)
    if isinstance(module, nnx.bridge.ToNNX):
        made = _mark_linen_sites(module, made)
    leaves = jax.tree.leaves(vars(module), is_leaf=is_node)
    if not made and any(isinstance(leaf, nnx.Param) for leaf in leaves):
        made.append(Site(found.paths, found, "", refusal="it has no weight of two axes"))
    return made


def _describe(
    site: Site,
    kind: type[DoRALayer] | None,
    registration: Registration | None,
    reads: tuple[Read, ...] | None,
    modules: list[Found],
) -> None:
    """Sets whether and how a weight is adapted or can be.

    Args:
      kind: the class that adapts the module as a layer, if any.
      reads: what reads the weight; None where no call was traced.
    """
    module: Any = site.found.module
    is_kernel = kind is not None and site.param == kind.kernel_name
    # A subclass that computes something else is no linear projection.
    is_plain = kind is not None and type(module).__call__ is kind.base_type.__call__
    hint = adaptation_hint(module)
    is_read_outside = any(not one.scopes.intersection(site.found.paths) for one in reads or ())
    if isinstance(module, DoRALayer) and is_kernel:
        site.is_layer, site.is_adapted = True, True
        site.how, site.is_linear = class_name(module.plain_type), module.is_linear(module)
        if is_read_outside:
            site.how += ", read without its adapter outside of its calls: give example="
    elif isinstance(site.adapter, WeightAdapter):
        spec = site.adapter.spec
        site.is_adapted, site.axes, site.is_lookup = True, spec.axes, spec.is_lookup
        site.is_linear = True
        site.how = "read by its module's methods"
        followed = _paths_of_readers(site, modules)
        if any(not one.scopes.intersection(followed) for one in reads or ()):
            site.how += ", read without its adapter by others: call these too in example="
    elif kind and is_kernel and (reads is None or hint or (is_plain and not is_read_outside)):
        plain_type = module.plain_type if has_dora_type(module) else type(module)
        site.is_layer, site.how = True, class_name(plain_type)
        site.is_linear = is_plain and kind.is_linear(module)
        site.stack_axis = _stack_axis(reads)
        if not is_plain:
            site.refusal = (
                f"a {type(module).__name__}, which computes something else than "
                f"nnx.{kind.base_type.__name__}: {hint or 'give example='}"
            )
        elif reads == ():
            site.refusal = "no operation of this call reads it"
    elif registration is not None or reads is not None:
        _describe_from_reads(site, registration, modules, reads)
    elif kind is None:
        site.refusal = why_unknown(module)
    else:
        site.refusal = f"no {kind.kernel_name}, which is all that is adapted of its layer"


def _paths_of_readers(site: Site, modules: list[Found]) -> set[str]:
    """Returns the paths of the modules whose methods follow an adapted weight."""
    paths = set(site.found.paths)
    for one in modules:
        if has_dora_type(one.module) and any(
            param == site.param and at_path(one.module, path) is site.found.module
            for path, param in one.module.dora_reads
        ):
            paths.update(one.paths)
    return paths


def _paths_within(found: Found, name: str) -> tuple[str, ...]:
    """Returns the paths of what a module has by this name."""
    return tuple(f"{path}/{name}".lstrip("/") for path in found.paths)


def _mark_linen_sites(module: nnx.Module, made: list[Site]) -> list[Site]:
    """Returns the weights of a linen module in nnx, none of which can be adapted here, without the
    adapters that it may have of its own."""
    names = {
        "/".join((name, *keys))
        for name, value in vars(module).items()
        for keys, _ in [((), value), *nested_leaves(value)]
    }
    kernels = {cls.kernel_name for cls in DORA_CLASSES.values()}
    adapters: set[str] = set()
    for site in made:
        site.is_linear = False
        site.refusal = "a linen module's: adapt that by jax_dora.linen.apply_dora, then ToNNX"
        stems = [f"{site.param}_"]
        if site.param.rpartition("/")[2] in kernels:
            stems.append(site.param.removesuffix(site.param.rpartition("/")[2]))
        for beside in ({f"{stem}{one}" for one in ADAPTER_NAMES} for stem in stems):
            if beside <= names:
                adapters |= beside
                site.is_adapted = True
                site.refusal = site.how = "a linen module's, by jax_dora.linen.apply_dora"
    return [site for site in made if site.param not in adapters]


def _contained_sites(found: Found) -> list[Site]:
    """Returns the weights in plain lists, tuples and dicts of a module, or of one of its
    parameters, none of which can hold an adapter."""
    made = []
    for name, value in vars(found.module).items():
        refusal = "it stands in a list, tuple or dict: make it an attribute of a module"
        inside = nested_leaves(value)
        if isinstance(value, nnx.Param) and not hasattr(value, "ndim"):
            refusal = "its parameter holds several arrays: make each a parameter of its own"
            inside = ((keys, type(value)(leaf)) for keys, leaf in nested_leaves(value.get_value()))
        for keys, weight in inside:
            if is_weight(weight):
                param = "/".join((name, *keys))
                paths = _paths_within(found, param)
                made.append(Site(paths, found, param, refusal=refusal, nested_param=weight))
    return made


def _reads_of(traced: ReadLog | None, found: Found, param: str) -> tuple[Read, ...] | None:
    """Returns the reads of a parameter; None where no call was traced."""
    if traced is None:
        return None
    return next(
        (traced.reads[path, param] for path in found.paths if (path, param) in traced.reads), ()
    )


def _describe_from_reads(
    site: Site,
    registration: Registration | None,
    modules: list[Found],
    reads: tuple[Read, ...] | None,
) -> None:
    """Describes a weight by its registration, or by its reads, or by both."""
    module = site.found.module
    axes = registration.axes_of(module, _stack_axis(reads)) if registration else None
    if reads is None:
        assert registration is not None
        site.axes, site.reader = axes or "", (module, ())
        site.is_linear = registration.linear
        site.is_lookup = not registration.linear
        site.how = f"registered, {axes}"
        if not axes:
            site.refusal = "its registration cannot say which axes are contracted"
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
            lacks = "leaves none of its axes" if "o" in missing else "contracts none of its axes"
            site.refusal = f"the product that reads it, {chosen.axes}, {lacks}"
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
            "it is quantised, and read by other code than its layer's own call: leave it out of "
            "the path of quantize"
        )
    elif isinstance(module, nnx.List):
        site.refusal = "it stands in an nnx.List: make it an attribute of a module"
    elif site.reader is None:
        site.refusal = "it is read outside of the methods of the modules that hold it"


def _stack_axis(reads: tuple[Read, ...] | None) -> int | None:
    """Returns the only axis of a kernel that its reads take apart, if they agree."""
    found = {read.axes for read in reads or () if read.kind != "other"}
    stacked_along = {axes.index("s") for axes in found if axes.count("s") == 1}
    return stacked_along.pop() if len(stacked_along) == 1 else None


def _is_head(path: str) -> bool:
    return path.rpartition("/")[2] in OUTPUT_HEADS
