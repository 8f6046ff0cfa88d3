"""Adds adapters to an existing torch model, and removes them."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.peft.replaced_parameters import replaced_parameters, warn_of
from dora_common.rules import ALL_LINEAR, as_rules, assign, listing
from torch_dora.adapt.coverage import coverage, is_linear, output_head, projection_shape
from torch_dora.adapt.rule import DoRARule
from torch_dora.adapt.whole_saves import warn_for_adapted
from torch_dora.layers import (
    LAYERS,
    DoRAExperts,
    DoRALayer,
    PackedExperts,
    check_is_module,
    dora_layers,
    fast_path,
    layer_class,
    named_modules,
    packed_experts,
    placement,
)
from torch_dora.layers.experts import put_layer, put_parameters_back

_LOG = logging.getLogger(__name__)

# The classes that wrap a model, by name, and how to get the inner model.
WRAPPERS = {
    "OptimizedModule": "model._orig_mod, and call torch.compile afterwards",
    "DataParallel": "model.module, and wrap it afterwards",
    "DistributedDataParallel": "model.module, and wrap it afterwards",
    "FullyShardedDataParallel": "the original model, and call fully_shard on it afterwards",
    "PeftModel": "model.unload(), which drops PEFT's adapters: first save them by "
    "model.save_pretrained, for torch_dora.peft.load_adapter, or use model.merge_and_unload()",
    "BankLinear": "the plain model that was passed to torch_dora.with_bank",
}
# Wrappers that can also wrap a part of a model, and then hide the layers inside.
NESTED_WRAPPERS = ("FullyShardedDataParallel", "BankLinear")
# The attributes of a module that store its hooks. A hook's handle refers to these dictionaries, so
# the new layer takes the same dictionary objects as the layer that it replaces.
HOOKS = [name for name in vars(nn.Module()) if "hook" in name]

type NamedModule = tuple[nn.Module, tuple[str, ...]]


def apply_dora(model: nn.Module, rules: DoRARule | Sequence[DoRARule]) -> Any:
    """Adds a fresh DoRA adapter to every layer of ``model`` that a rule matches, in place.

        model = apply_dora(model, DoRARule(r".*\\.(q|v)_proj", rank=16, alpha=32))
        model = apply_dora(model, DoRARule("all-linear", rank=16, alpha=32))

    These layers can be adapted: ``torch.nn.Linear``, ``Conv1d``, ``Conv2d``, ``Conv3d``,
    ``Embedding``, transformers' Conv1D and FalconLinear, and bitsandbytes' Linear4bit. Packed
    experts can be adapted too: a parameter with a matrix for each expert, by the parameter's name,
    as in "model.layers.0.mlp.experts.down_proj", or by that of its module.

    - Weights and biases are shared, not copied. All parameters of the model except the adapters are
      frozen (``requires_grad`` is False). Create an optimizer afterwards: one of before does not
      have the adapters.
    - A shared module stays shared; a rule that matches one of its names adapts it everywhere.
    - The new layer gets the hooks of the replaced layer, including accelerate's. It also keeps the
      style that parallelize_module gave a linear layer: the adapter is sharded like the weight.
    - The adapters are drawn from torch's generator: see ``torch.manual_seed``.
    - "all-linear" leaves out projections that cannot be adapted, and a warning lists them. See
      :func:`torch_dora.coverage`, whose summary is logged.
    - An adapter has an effect only where its layer is called. It gets no gradient where the model
      reads the layer's weight directly, as the kernels of Mamba do. Where the model calls the layer
      through a plain list, a dict or a closure, the base layer stays.

    Args:
        model: a model, or one of the layers above, whose name is then "".
        rules: one rule or several; the first rule that matches a layer's name adapts the layer.
            Only modules that have parameters themselves are matched, so ".*" does not match
            containers.

    Returns:
        ``model``, or the DoRA layer if the model itself is a layer.

    Raises:
        TypeError: ``model`` is not a module, or wraps one; it has PEFT's adapters; a matched module
            cannot be adapted.
        ValueError: a rule adapts nothing; a matched layer is adapted already; a rule does not suit
            its layer; a parameter of a lazy module has no shape yet. The message lists the names in
            question, and ``model`` is unchanged.
        NotImplementedError: a matched layer has a setting that the adapted layer would not respect:
            it is parametrized, its weight is offloaded, FSDP manages it, ... Or DeepSpeed's ZeRO-3
            has partitioned the model.
    """
    check_model(model)
    refuse_peft(model)
    placement.refuse_partitioned(model.named_parameters())
    rules = as_rules(DoRARule, rules)
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ValueError(
            "these parameters of lazy modules have no shape yet; first call the model once, which "
            f"sets their shapes:{listing(lazy)}"
        )
    layers = layers_with_names(model)
    head = output_head(model)
    left_out = _left_out(rules, layers)
    try:
        chosen = assign(
            rules,
            [names for _, names in layers],
            [is_linear(module) and module is not head for module, _ in layers],
        )
    except ValueError as error:
        raise ValueError("\n".join(filter(None, (str(error), left_out)))) from None
    matched = [(*layer, rule) for layer, rule in zip(layers, chosen, strict=True) if rule]
    check_adaptable(model, [(module, names) for module, names, _ in matched])
    if left_out:
        _LOG.warning(left_out)
    trainable = [p for p in model.parameters() if p.requires_grad]
    try:
        new = {
            replaced_id(module): adapt(module, names[0], rule) for module, names, rule in matched
        }
    except Exception:
        # The layers that were built before the error have frozen their weights.
        for parameter in trainable:
            parameter.requires_grad_(True)
        raise
    model = replace_modules(model, new)
    adapters = {
        id(getattr(layer, name)) for _, layer in dora_layers(model) for name in ADAPTER_NAMES
    }
    for parameter in model.parameters():
        if id(parameter) not in adapters:
            parameter.requires_grad_(False)
    _LOG.info(coverage(model).summary())
    return model


def remove_dora(model: nn.Module) -> Any:
    """Restores the base layer of every adapted layer, in place: the model is exactly the base model
    again. Other parameters that a PEFT folder has replaced stay; a warning lists them.

    The parameters stay frozen. Returns ``model``, or the base layer if the model itself is a layer.

    Raises:
        TypeError: ``model`` is not a module, or wraps one.
        NotImplementedError: FSDP or accelerate's offloading manages a layer's parameters.
    """
    check_model(model)
    layers = list(dora_layers(model))
    placement.refuse_unreplaceable(layers, "remove adapters before fully_shard")
    warn_of(replaced_parameters(model), "without its adapters, ")
    return replace_modules(
        model, {id(layer): layer.base.train(layer.training) for _, layer in layers}
    )


def check_model(model: Any, inside: Collection[str] = NESTED_WRAPPERS) -> None:
    """Raises TypeError if ``model`` is not a module, if it wraps the real model or is inside
    FSDP1's wrapper, or if it contains one of the wrappers ``inside``."""
    check_is_module(model)
    for name, module in named_modules(model):
        where = f"model{name and '.'}{name} is a {type(module).__name__}"
        if placement.is_in_fsdp(module) and isinstance(vars(module).get("weight"), Tensor):
            raise TypeError(
                f"{where} whose weight FSDP1 has moved into a flat parameter; pass "
                f"{WRAPPERS['FullyShardedDataParallel']}"
            )
        for kind in type(module).__mro__:
            if kind.__name__ in (inside if name else WRAPPERS):
                wrapped = "a part of the model" if name else "the model itself"
                raise TypeError(
                    f"{where}, which wraps {wrapped}; pass the inner one: {WRAPPERS[kind.__name__]}"
                )


def refuse_peft(model: nn.Module) -> None:
    """Raises TypeError that lists the layers of ``model`` that have PEFT's adapters."""
    if peft_layers := [
        name
        for name, module in named_modules(model)
        if any(kind.__name__ == "BaseTunerLayer" for kind in type(module).__mro__)
    ]:
        raise TypeError(
            "model has PEFT's own adapters; expected the base model, as it was before PEFT or "
            "transformers' load_adapter and add_adapter: torch_dora.peft.load_adapter reads "
            f"PEFT's folders. These layers have PEFT's adapters:{listing(peft_layers)}"
        )


def adapt(module: nn.Module, name: str, rule: DoRARule) -> DoRALayer:
    """Returns a DoRA layer that adapts ``module``; ``name`` is for error messages."""
    kind = layer_class(module)
    assert kind is not None
    try:
        layer = kind.from_base(module, **rule.options())
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"{name!r} cannot be adapted: {error}") from error
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(layer, hook)
    return layer


def modules_with_names(model: nn.Module) -> list[NamedModule]:
    """Returns every module once, with all its names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in named_modules(model, remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return [(module, tuple(found)) for module, found in names.items()]


def layers_with_names(model: nn.Module) -> list[NamedModule]:
    """Returns every module that has a weight or other parameters itself, with all its names. A
    module with packed experts is replaced by these, which have its names after their own."""
    layers: list[NamedModule] = []
    for module, names in modules_with_names(model):
        packed = packed_experts(module)
        for parameter, experts in packed.items():
            own = tuple(f"{name}.{parameter}".lstrip(".") for name in names)
            layers.append((experts, own + names))
        is_layer = [*module.parameters(recurse=False)] or parametrize.is_parametrized(module)
        if not packed and (is_layer or projection_shape(module)):
            layers.append((module, names))
    return layers


def replace_modules(model: nn.Module, new: Mapping[int, nn.Module]) -> nn.Module:
    """Replaces modules and packed experts of ``model``, by the ids of the modules or parameters, by
    the new modules, which take over the hooks; returns the model or its replacement."""
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if isinstance(layer := new.get(id(parameter)), DoRAExperts):
                put_layer(module, name, layer)
        if id(module) in new:
            vars(new[id(module)]).update({name: vars(module)[name] for name in HOOKS})
        for name, child in list(module._modules.items()):
            if id(child) in new:
                module._modules[name] = new[id(child)]
    put_parameters_back(model)
    model = new.get(id(model), model)
    fast_path.disable_for_adapted(model, DoRALayer)
    warn_for_adapted(model)
    return model


def replaced_id(module: nn.Module) -> int:
    """Returns the id by which :func:`replace_modules` replaces ``module``."""
    return id(module.weight if isinstance(module, PackedExperts) else module)


def _left_out(rules: Sequence[DoRARule], layers: Iterable[NamedModule]) -> str:
    """Returns a message that lists the projections that "all-linear" would select if they could be
    adapted, or "" if there are none."""
    all_linear = [rule for rule in rules if rule.path == ALL_LINEAR]
    left_out = [
        f"{names[0]} ({type(module).__name__})"
        for module, names in layers
        if projection_shape(module) and layer_class(module) is None
        if not isinstance(module, DoRALayer)
        if any(rule.matches(names[0], linear=True) for rule in all_linear)
    ]
    if not left_out:
        return ""
    return (
        "'all-linear' leaves out these projections, which cannot be adapted; "
        f"print(torch_dora.coverage(model)) shows why:{listing(left_out)}"
    )


def check_adaptable(model: nn.Module, matched: list[NamedModule]) -> None:
    """Raises an error that lists the matched modules that cannot be adapted."""

    def list_modules(modules: Iterable[NamedModule]) -> str:
        return listing(f"{names[0]} ({type(module).__name__})" for module, names in modules)

    if adapted := [(m, names) for m, names in matched if isinstance(m, DoRALayer)]:
        raise ValueError(
            "a layer holds one adapter at a time, and these matched layers have one already; first "
            f"remove it with remove_dora, or merge it with merge_dora:{list_modules(adapted)}"
        )
    if others := [(m, names) for m, names in matched if layer_class(m) is None]:
        expected = ", ".join(kind.BASES_NAMED for kind in LAYERS)
        raise TypeError(
            f"the rules match modules that cannot be adapted; expected {expected}, but no "
            "subclasses that override forward, and not the out_proj of a "
            "torch.nn.MultiheadAttention, which reads that layer's weight and never calls it. "
            f"Change the rules' paths so that they do not match:{list_modules(others)}"
        )
    placement.refuse_fsdp(
        [(names[0], module) for module, names in matched],
        "call apply_dora before fully_shard; call load_adapter before fully_shard too, or on "
        "adapters with the folder's rank and alpha",
    )
    offloads = any(hasattr(module, "_hf_hook") for module in model.modules())
    offloaded = [
        (module, names)
        for module, names in matched
        if any(parameter.is_meta for parameter in module.parameters(recurse=False))
    ]
    if offloads and offloaded:
        raise NotImplementedError(
            "accelerate has offloaded the weights of these layers to the CPU or to disk, and the "
            "initial magnitude needs them; load the model without offloading (a device_map with "
            f"devices only), or do not adapt these layers:{list_modules(offloaded)}"
        )
