"""Adapters into an existing torch model, and out of it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.rules import as_rules, assign, listing
from torch_dora.adapt.rule import DoRARule
from torch_dora.layers import (
    LAYERS,
    DoRAConv1D,
    DoRALayer,
    DoRALinear,
    dora_layers,
    fast_path,
    layer_class,
    named_modules,
    placement,
)
from torch_dora.layers.linear import is_conv1d

# What wraps a model, by the name of its class, and the model inside.
WRAPPERS = {
    "OptimizedModule": "model._orig_mod, and call torch.compile afterwards",
    "DataParallel": "model.module, and wrap it afterwards",
    "DistributedDataParallel": "model.module, and wrap it afterwards",
    "FullyShardedDataParallel": "the model as it was, and call fully_shard on it afterwards",
    "PeftModel": "what model.unload() returns, or read its folder by torch_dora.peft.load_adapter",
    "BankLinear": "the plain model that torch_dora.with_bank was given",
}
# Those that may wrap a part of a model beside others, and hide its layers from whoever changes it.
HIDING = ("FullyShardedDataParallel", "BankLinear")
# What the hooks of a module are stored in. Handles that remove hooks know the dictionaries, so a
# layer takes over the very ones of the layer that it replaces.
HOOKS = [name for name in vars(nn.Module()) if "hook" in name]

type Named = tuple[nn.Module, tuple[str, ...]]


def apply_dora(model: nn.Module, rules: DoRARule | Sequence[DoRARule]) -> Any:
    """Puts a fresh DoRA adapter into every layer of ``model`` that a rule matches, in place.

        model = apply_dora(model, DoRARule(r".*\\.(q|v)_proj", rank=16, alpha=32))
        model = apply_dora(model, DoRARule("all-linear", rank=16, alpha=32))

    Weights and biases are shared, not copied. Every parameter of the model that is not of an
    adapter is frozen (``requires_grad`` is False). Adapted are ``torch.nn.Linear``, ``Conv1d``,
    ``Conv2d``, ``Conv3d``, ``Embedding``, transformers' Conv1D and FalconLinear, and bitsandbytes'
    Linear4bit; a module that is shared stays shared, and a rule that matches one of its names
    adapts it everywhere. A layer's hooks, accelerate's too, go over to the layer in its place, and
    with them the style that parallelize_module gave a linear layer: the adapter is sharded as its
    weight. The adapters draw from torch's generator: see ``torch.manual_seed``. An adapter acts
    where its layer is called: it gets no gradient where the model reads the layer's weight instead,
    as the kernels of Mamba do, nor where it calls the layer by a plain list, a dict or a closure,
    in which the base layer stays.

    Args:
        model: a model; one of the layers above is one too, whose name is "".
        rules: one rule or several; the first that matches a layer's name adapts it. Only modules
            that hold parameters themselves are matched, so ".*" does not stumble over containers.

    Returns:
        ``model``, or the DoRA layer in its place where the model itself is a layer.

    Raises:
        TypeError: ``model`` is no module, or a wrapper of one; PEFT's adapters are in it; a matched
            module cannot be adapted.
        ValueError: a rule adapts nothing; a matched layer is adapted already; a rule does not suit
            its layer; a parameter of a lazy module has no shape yet. The message lists what is
            there, and ``model`` is unchanged.
        NotImplementedError: a matched layer has a setting that its adapter would not honour: it is
            parametrized, its weight is offloaded, FSDP holds it, ...
    """
    check_model(model)
    refuse_peft(model)
    rules = as_rules(DoRARule, rules)
    if lazy := [name for name, one in model.named_parameters() if is_lazy(one)]:
        raise ValueError(
            "these parameters of lazy modules have no shape yet; call the model once, which gives "
            f"them theirs, first:{listing(lazy)}"
        )
    layers = [
        (module, names)
        for module, names in modules_with_names(model)
        if [*module.parameters(recurse=False)] or parametrize.is_parametrized(module)
    ]
    head = output_head(model)
    chosen = assign(
        rules,
        [names for _, names in layers],
        [_is_linear(module) and module is not head for module, _ in layers],
    )
    matched = [(*layer, rule) for layer, rule in zip(layers, chosen, strict=True) if rule]
    refuse(model, [(module, names) for module, names, _ in matched])
    trainable = [p for p in model.parameters() if p.requires_grad]
    try:
        new = {id(module): adapt(module, names[0], rule) for module, names, rule in matched}
    except Exception:
        # A layer that was made before the one that failed has frozen its weight.
        for parameter in trainable:
            parameter.requires_grad_(True)
        raise
    model = replace(model, new)
    adapters = {id(getattr(one, name)) for _, one in dora_layers(model) for name in ADAPTER_NAMES}
    for parameter in model.parameters():
        if id(parameter) not in adapters:
            parameter.requires_grad_(False)
    return model


def remove_dora(model: nn.Module) -> Any:
    """Puts every adapted layer's base layer back, in place: the base model exactly.

    Its parameters stay frozen. Returns ``model``, or the base layer in its place.

    Raises:
        TypeError: ``model`` is no module, or a wrapper of one.
        NotImplementedError: FSDP or accelerate's offloading holds a layer's parameters.
    """
    check_model(model)
    layers = list(dora_layers(model))
    placement.refuse_held(layers, "remove adapters before fully_shard")
    return replace(model, {id(one): one.base.train(one.training) for _, one in layers})


def check_model(model: Any, inside: Collection[str] = HIDING) -> None:
    """Raises TypeError unless ``model`` is a module, and none that wraps the model itself; nor may
    it have one of the wrappers ``inside`` in it, nor be inside of FSDP1's."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    for name, module in named_modules(model):
        where = f"model{name and '.'}{name} is a {type(module).__name__}"
        if placement.is_in_fsdp(module) and isinstance(vars(module).get("weight"), Tensor):
            raise TypeError(
                f"{where} whose weight FSDP1 has made a part of a flat parameter; pass "
                f"{WRAPPERS['FullyShardedDataParallel']}"
            )
        for kind in type(module).__mro__:
            if kind.__name__ in (inside if name else WRAPPERS):
                wrapped = "a part of the model" if name else "the model itself"
                raise TypeError(
                    f"{where}, which wraps {wrapped}; pass the inner one: {WRAPPERS[kind.__name__]}"
                )


def refuse_peft(model: nn.Module) -> None:
    """Raises TypeError that lists the layers of ``model`` that PEFT has put adapters into."""
    held = [
        name
        for name, module in named_modules(model)
        if any(kind.__name__ == "BaseTunerLayer" for kind in type(module).__mro__)
    ]
    if held:
        raise TypeError(
            "model has PEFT's own adapters in it; expected the base model, as it was before PEFT "
            "or transformers' load_adapter and add_adapter: torch_dora.peft.load_adapter reads "
            f"PEFT's folders. They are in:{listing(held)}"
        )


def adapt(module: nn.Module, name: str, rule: DoRARule) -> DoRALayer:
    """Returns a DoRA layer in the place of ``module``, whose name is for messages."""
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


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | DoRALinear | DoRAConv1D) or is_conv1d(module)


def output_head(model: nn.Module) -> nn.Module | None:
    """Returns the output head, where the model tells of one."""
    return getattr(model, "get_output_embeddings", lambda: None)()


def modules_with_names(model: nn.Module) -> list[Named]:
    """Returns every module with all its names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in named_modules(model, remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return [(module, tuple(found)) for module, found in names.items()]


def replace(model: nn.Module, new: Mapping[int, nn.Module]) -> nn.Module:
    """Returns ``model`` with new modules, by the ids of those whose place and hooks they take."""
    for module in list(model.modules()):
        if id(module) in new:
            vars(new[id(module)]).update({name: vars(module)[name] for name in HOOKS})
        for name, child in list(module._modules.items()):
            if id(child) in new:
                setattr(module, name, new[id(child)])
    model = new.get(id(model), model)
    fast_path.avoid(model, DoRALayer)
    return model


def refuse(model: nn.Module, matched: list[Named]) -> None:
    """Raises an error that lists those of the matched modules that cannot be adapted."""

    def listed(modules: Iterable[Named]) -> str:
        return listing(f"{names[0]} ({type(module).__name__})" for module, names in modules)

    if adapted := [one for one in matched if isinstance(one[0], DoRALayer)]:
        raise ValueError(
            "a layer holds one adapter at a time, and these that the rules match hold one already: "
            f"take it out with remove_dora, or merge it with merge_dora, first:{listed(adapted)}"
        )
    if others := [one for one in matched if layer_class(one[0]) is None]:
        expected = ", ".join(kind.BASES_NAMED for kind in LAYERS)
        raise TypeError(
            f"the rules match modules that cannot be adapted; expected {expected}, not subclasses "
            "that compute something else, nor the out_proj of a torch.nn.MultiheadAttention, which "
            "reads that layer's weight and never calls it: give the rules paths that leave out"
            f"{listed(others)}"
        )
    placement.refuse_fsdp(
        [(names[0], module) for module, names in matched],
        "call apply_dora before fully_shard, and load_adapter before it or with an adapter of the "
        "folder's rank and alpha in place",
    )
    offloads = any(hasattr(module, "_hf_hook") for module in model.modules())
    offloaded = [one for one in matched if any(p.is_meta for p in one[0].parameters(recurse=False))]
    if offloads and offloaded:
        raise NotImplementedError(
            "accelerate has offloaded the weights of these layers to the CPU or to disk, and an "
            "adapter needs them to start from; load the model without offloading (a device_map "
            f"that names devices alone), or leave these layers out:{listed(offloaded)}"
        )
