"""A PEFT folder into a torch model."""

import copy
import functools
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dora_common.hyperparameters import ADAPTER_NAMES, DropoutMode
from dora_common.peft.fit import Adapter, Fit
from dora_common.peft.folder import Folder, open_folder
from torch_dora.adapt import DoRARule
from torch_dora.adapt.apply import adapt, refuse, replace
from torch_dora.layers import DoRALayer, dora_layers, named_modules, placement
from torch_dora.ops import check, shards
from torch_dora.peft.layers import layers_of, outline, parameters_of, tell_of_shared


def load_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    adapter: str | None = None,
    adapter_dtype: torch.dtype | None = None,
    dropout_mode: DropoutMode | None = None,
    implementation: str | None = None,
) -> Any:
    """Puts the adapter of a PEFT folder into ``model``, in place.

        model = load_adapter(model, "folder")

    Everything in the folder finds its place before anything is made, and everything is made and
    read before ``model`` is changed. Afterwards the adapter is trainable, and so is what the folder
    holds whole (modules_to_save, biases), which is cast to the model's dtypes; the rest is frozen,
    rows of single tokens (trainable_token_indices) included. A module of modules_to_save whose
    weight is tied to another gets a copy of its own, as in PEFT. What an earlier folder replaced in
    the base model stays as that folder had it; a warning is logged of what ``save_adapter`` has to
    be given to store it again.

    A LoRA folder is loaded too: as the DoRA that computes the same, its magnitude equal to its
    norm.

    Of a model that is sharded all processes call this and read the folder. One that FSDP holds
    keeps its layers: they need adapters of the folder's rank and alpha, whose values become the
    folder's.

    Args:
        model: plain, or with an adapter, in whose place the folder's comes.
        folder: holds adapter_config.json and adapter_model.safetensors.
        adapter: the adapter's name, where the files lie in a subfolder of that name, or the keys
            have it.
        adapter_dtype: of lora_a and lora_b; by default that of the file.
        dropout_mode: where the folder's lora_dropout is not 0; by default as in PEFT, "input" for
            DoRA and "adapter" for LoRA. As always, ``model.eval()`` turns dropout off.
        implementation: of the operators, as :class:`~torch_dora.DoRALinear`'s.

    Returns:
        ``model``.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder or adapter, or a file is
            missing from it.
        ValueError: a file is damaged; a tensor has no place in the model or another shape than it,
            or one is missing, or is not finite. What is wrong is listed.
        NotImplementedError: the configuration asks for something that is not supported; parameters
            are on the meta device or offloaded; FSDP holds layers that would have to be replaced.
        TypeError: an argument or a field of the configuration has the wrong type.
    """
    if adapter_dtype is not None:
        check.is_float_dtype("adapter_dtype", adapter_dtype)
    layers = layers_of(model)
    with open_folder(folder, "pt", adapter) as source:
        parameters = parameters_of(model)
        model_outline = outline(layers, parameters)
        fit = source.fit(model_outline)
        weights = [f"{name}.weight" for name in fit.adapters]
        placement.refuse_meta(
            [(name, parameters[name]) for name in [*weights, *fit.parameters, *fit.tokens]]
        )
        trainable = {parameter: parameter.requires_grad for parameter in model.parameters()}
        try:
            wholes = {
                name: source.checked(
                    name, source.read_parameter(name, keys).to(parameters[name].dtype)
                )
                for name, keys in fit.parameters.items()
            }
            rows = {
                name: (list(at), source.checked(key, source.read(key).to(parameters[name].dtype)))
                for name, (key, at) in fit.tokens.items()
            }
            new = _make_layers(model, source, fit, adapter_dtype, dropout_mode, implementation)
            stays = [(name, one) for name, one in dora_layers(model) if id(one) not in new]
            values = [
                (one, _values(one, source, fit.adapters[name], adapter_dtype is None))
                for name, one in stays
            ]
        except BaseException:
            for parameter, was in trainable.items():
                parameter.requires_grad_(was)
            raise
    source.warn_about_replaced(fit, model_outline)
    tell_of_shared(model, fit.adapters.keys())
    replace(model, new)
    for layer, tensors in values:
        _fill(layer, tensors)
    for name in fit.untied:
        _untie(model, name)
    parameters = parameters_of(model)
    for name, value in wholes.items():
        shards.fill(parameters[name], value)
    for name, (indices, value) in rows.items():
        whole = shards.whole(parameters[name]).detach().clone()
        whole[indices] = value.to(whole)
        shards.fill(parameters[name], whole)
    stored = {
        id(parameters[name])
        for name in wholes
        if source.config.stores(name, of_adapted_layer=name.rpartition(".")[0] in fit.adapters)
    }
    for _, layer in dora_layers(model):
        stored |= {id(getattr(layer, name)) for name in ADAPTER_NAMES}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in stored)
    return model


def _make_layers(
    model: nn.Module,
    source: Folder,
    fit: Fit,
    adapter_dtype: torch.dtype | None,
    dropout_mode: DropoutMode | None,
    implementation: str | None,
) -> dict[int, nn.Module]:
    """Returns, by the id of the module in whose place it comes, a new DoRA layer for every module
    that the folder has an adapter for, and the base layer of every other that has one now; nothing
    for a layer that FSDP holds, which stays. The model is not changed."""
    modules: dict[str, Any] = dict(named_modules(model, remove_duplicate=False))
    rules = {}
    for name, one in fit.adapters.items():
        dtypes = (getattr(torch, dtype) for dtype in source.dtypes(one))
        rules[name] = DoRARule(
            re.escape(name),
            **source.options(one, dropout_mode),
            adapter_dtype=adapter_dtype or functools.reduce(torch.promote_types, dtypes),
            implementation=implementation,
        )
    stays = {name for name, rule in rules.items() if _stays(modules[name], rule)}
    bases = {name: modules[name] for name in fit.adapters}
    bases |= {name: one.base.train(one.training) for name, one in dora_layers(model)}
    placement.refuse_fsdp(
        [(name, modules[name]) for name in bases if name not in stays]
        + [(name, modules[name.rpartition(".")[0]]) for name in fit.untied],
        "load_adapter before fully_shard, or call apply_dora before it with the folder's layers, "
        "rank, alpha and dropout",
    )
    refuse(model, [(bases[name], (name,)) for name in fit.adapters if name not in stays])
    new = {id(modules[name]): base for name, base in bases.items() if name not in stays}
    for name, rule in rules.items():
        if name not in stays:
            layer = new[id(modules[name])] = adapt(bases[name], name, rule)
            _fill(layer, _values(layer, source, fit.adapters[name], adapter_dtype is None))
            norm = layer.norm() if source.config.use_dora else layer.magnitude
            source.check_norm(name, shards.whole(norm))
    return new


def _stays(module: Any, rule: DoRARule) -> bool:
    """Returns whether FSDP holds ``module``, and it is the layer that ``rule`` would make."""
    if not (placement.is_in_fsdp(module) and isinstance(module, DoRALayer)):
        return False
    settings = ["rank", "alpha", "use_rslora", "dropout"] + ["dropout_mode"] * (rule.dropout > 0)
    return all(getattr(module, name) == getattr(rule, name) for name in settings)


def _values(layer: Any, source: Folder, adapter: Adapter, exactly: bool) -> dict[str, Tensor]:
    """Returns the folder's tensors for ``layer``; of a LoRA folder no magnitude."""
    values = {}
    for name in ("lora_a", "lora_b"):
        key, parameter = adapter.keys[name], getattr(layer, name)
        value = source.read(key).reshape(parameter.shape).to(parameter.dtype)
        values[name] = source.checked(key, value)
    if key := adapter.keys.get("magnitude"):
        value = values["magnitude"] = source.read(key).reshape(-1)
        if exactly:
            source.check_not_rounded(key, value, value.to(layer.magnitude.dtype))
    return values


def _fill(layer: Any, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        shards.fill(getattr(layer, name), value)
    if "magnitude" not in values:
        layer.reset_magnitude()


def _untie(model: nn.Module, name: str) -> None:
    """Gives the parameter ``name`` an array of its own, and its module too where it is shared."""
    path, _, attribute = name.rpartition(".")
    modules = list(named_modules(model, remove_duplicate=False))
    module = dict(modules)[path]
    if sum(module is one for _, one in modules) > 1:
        module = copy.copy(module)
        module._parameters = dict(module._parameters)
        parent, _, last = path.rpartition(".")
        setattr(dict(modules)[parent], last, module)
    old = getattr(module, attribute)
    new = old.detach().clone()
    setattr(module, attribute, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
