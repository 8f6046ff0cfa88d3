"""Loads a PEFT folder into a torch model."""

import contextlib
import copy
import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dora_common.hyperparameters import ADAPTER_NAMES, DropoutMode
from dora_common.peft.destinations import Adapter, Destinations
from dora_common.peft.folder import Folder, open_folder
from dora_common.peft.replaced_parameters import replace
from dora_common.peft.vocabulary import resized
from torch_dora.adapt import DoRARule
from torch_dora.adapt.apply import (
    WRAPPERS,
    adapt,
    check_adaptable,
    check_model,
    replace_modules,
    replaced_id,
)
from torch_dora.layers import (
    DoRALayer,
    dora_layers,
    named_modules,
    packed_experts,
    placement,
    record_untied,
)
from torch_dora.ops import check, shards
from torch_dora.peft.layers import (
    architecture,
    from_peft,
    layers_of,
    parameters_of,
    warn_of_shared,
    weight_name,
)


def load_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    adapter: str | None = None,
    adapter_dtype: torch.dtype | None = None,
    dropout_mode: DropoutMode | None = None,
    implementation: str | None = None,
) -> Any:
    """Loads the adapter of a PEFT folder into ``model``, in place.

        model = load_adapter(model, "folder")

    The folder is checked against the model, read, and converted completely before ``model`` is
    changed. A LoRA folder becomes the DoRA adapter that computes the same: its magnitude is its
    norm.

    Afterwards these parameters are trainable: the adapter, and the parameters that the folder
    stores whole (modules_to_save, biases), which are cast to the model's dtypes. All others are
    frozen, including rows of single tokens (trainable_token_indices). A module of modules_to_save
    whose weight is tied to another module gets its own copy, as in PEFT, and
    ``config.tie_word_embeddings`` of a transformers model becomes False. Create an optimizer
    afterwards: one of before has the parameters of an adapter that is replaced.

    If the folder is of a model with another number of tokens, and stores the embedding and the
    output head, ``model`` is resized by its ``resize_token_embeddings``. A warning names both
    numbers.

    What an earlier folder replaced in the base model is not restored: a warning lists what this
    folder does not replace too. Another one lists what ``save_adapter`` needs to store it again.

    If the model is sharded, all processes must call this function and read the folder. Layers that
    FSDP manages are not replaced: they need adapters of the folder's rank and alpha, which then get
    the folder's values.

    Args:
        model: a plain model, or one with an adapter, which the folder's adapter replaces.
        folder: has adapter_config.json and adapter_model.safetensors.
        adapter: the adapter's name, if the files are in a subfolder of that name or the tensors'
            keys contain it.
        adapter_dtype: the dtype of lora_a and lora_b; by default that of the file.
        dropout_mode: used if the folder's lora_dropout is not 0; by default as in PEFT, "input" for
            DoRA and "adapter" for LoRA. ``model.eval()`` turns dropout off as usual.
        implementation: of the operators, as in :class:`~torch_dora.DoRALinear`.

    Returns:
        ``model``.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder or adapter, or a file is
            missing.
        ValueError: a file is damaged; a tensor has no place in the model, has another shape, is
            missing or is not finite. The message lists the problems.
        NotImplementedError: the configuration has an unsupported setting; parameters are on the
            meta device or offloaded; FSDP manages layers that would have to be replaced.
        TypeError: an argument or a field of the configuration has the wrong type.
    """
    if adapter_dtype is not None:
        check.is_float_dtype("adapter_dtype", adapter_dtype)
    check_model(model, inside=WRAPPERS)
    placement.refuse_partitioned(model.named_parameters())
    layers = layers_of(model)
    with open_folder(folder, "pt", adapter) as source, contextlib.ExitStack() as undo:
        parameters = parameters_of(model)
        model_architecture = architecture(layers, parameters)
        if (size := source.new_vocabulary(model, model_architecture)) is not None:
            source.destinations(resized(model_architecture, size))
            undo.enter_context(_resized(model, size))
            parameters = parameters_of(model)
            model_architecture = architecture(layers_of(model), parameters)
        places = source.destinations(model_architecture)
        weights = [weight_name(adapter.layer) for adapter in places.adapters.values()]
        placement.refuse_meta(
            [(name, parameters[name]) for name in [*weights, *places.parameters, *places.tokens]]
        )
        trainable = {parameter: parameter.requires_grad for parameter in model.parameters()}
        try:
            full_values = {
                name: source.checked(
                    name, source.read_parameter(name, keys).to(parameters[name].dtype)
                )
                for name, keys in places.parameters.items()
            }
            rows = {
                name: (list(at), source.checked(key, source.read(key).to(parameters[name].dtype)))
                for name, (key, at) in places.tokens.items()
            }
            new = _make_layers(model, source, places, adapter_dtype, dropout_mode, implementation)
            unchanged = [
                (name, layer) for name, layer in dora_layers(model) if id(layer) not in new
            ]
            values = [
                (
                    layer,
                    _read_values(layer, source, places.adapters[name], adapter_dtype is None),
                )
                for name, layer in unchanged
            ]
        except BaseException:
            for parameter, was in trainable.items():
                parameter.requires_grad_(was)
            raise
    source.warn_about_replaced(places, model_architecture)
    replace(model, folder, places.replaced_rows(model_architecture))
    warn_of_shared(model, places.adapters.keys())
    replace_modules(model, new)
    for layer, tensors in values:
        _set_values(layer, tensors)
    for name in places.untied:
        _untie(model, name)
    if places.untied:
        record_untied(model)
    parameters = parameters_of(model)
    for name, value in full_values.items():
        shards.fill(parameters[name], value)
    for name, (indices, value) in rows.items():
        whole = shards.full_tensor(parameters[name]).detach().clone()
        whole[indices] = value.to(whole)
        shards.fill(parameters[name], whole)
    stored = {
        id(parameters[name])
        for name in full_values
        if source.config.stores(name, of_adapted_layer=name.rpartition(".")[0] in places.adapters)
    }
    for _, layer in dora_layers(model):
        stored |= {id(getattr(layer, name)) for name in ADAPTER_NAMES}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in stored)
    return model


@contextlib.contextmanager
def _resized(model: Any, size: int) -> Iterator[None]:
    """Resizes the vocabulary of ``model``, and undoes this if an error is raised."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = [one for one in embeddings if one is not None]
    if any(isinstance(one, DoRALayer) for one in tables):
        raise ValueError(
            "the folder is of another number of tokens, and the model's embedding or output head "
            "has an adapter; expected the plain base model, which can be resized"
        )
    placement.refuse_fsdp(
        [(type(one).__name__, one) for one in tables], "load_adapter before fully_shard"
    )
    old = [one.weight.detach() for one in tables]
    model.resize_token_embeddings(size, mean_resizing=False)
    try:
        yield
    except BaseException:
        model.resize_token_embeddings(old[0].shape[0], mean_resizing=False)
        with torch.no_grad():
            for one, weight in zip(tables, old, strict=True):
                one.weight.copy_(weight)
        raise


def _make_layers(
    model: nn.Module,
    source: Folder,
    places: Destinations,
    adapter_dtype: torch.dtype | None,
    dropout_mode: DropoutMode | None,
    implementation: str | None,
) -> dict[int, nn.Module]:
    """Returns the new modules by the ids of those that they replace, without changing the model: a
    DoRA layer for every adapter of the folder, and the base of every other adapted layer. A layer
    that FSDP manages is unchanged, and not in the result."""
    modules: dict[str, Any] = dict(named_modules(model, remove_duplicate=False))
    for name, module in list(modules.items()):
        for parameter, experts in packed_experts(module).items():
            modules[f"{name}.{parameter}".lstrip(".")] = experts
    rules = {}
    for name, adapter in places.adapters.items():
        dtypes = (getattr(torch, dtype) for dtype in source.dtypes(adapter))
        rules[name] = DoRARule(
            re.escape(name),
            **source.options(adapter, dropout_mode),
            adapter_dtype=adapter_dtype or functools.reduce(torch.promote_types, dtypes),
            implementation=implementation,
        )
    unchanged = {name for name, rule in rules.items() if _is_unchanged(modules[name], rule)}
    bases = {name: modules[name] for name in places.adapters}
    bases |= {name: layer.base.train(layer.training) for name, layer in dora_layers(model)}
    placement.refuse_fsdp(
        [(name, modules[name]) for name in bases if name not in unchanged]
        + [(name, modules[name.rpartition(".")[0]]) for name in places.untied],
        "load_adapter before fully_shard, or call apply_dora before it with the folder's layers, "
        "rank, alpha and dropout",
    )
    check_adaptable(
        model, [(bases[name], (name,)) for name in places.adapters if name not in unchanged]
    )
    replaced = {name: replaced_id(modules[name]) for name in bases if name not in unchanged}
    new = {replaced[name]: base for name, base in bases.items() if name in replaced}
    for name, rule in rules.items():
        if name not in unchanged:
            layer = new[replaced[name]] = adapt(bases[name], name, rule)
            _set_values(
                layer,
                _read_values(layer, source, places.adapters[name], adapter_dtype is None),
            )
            norm = layer.norm() if source.config.use_dora else layer.magnitude
            source.check_norm(name, shards.full_tensor(norm))
    return new


def _is_unchanged(module: Any, rule: DoRARule) -> bool:
    """Returns whether FSDP manages ``module`` and the module has the settings of ``rule``."""
    if not (placement.is_in_fsdp(module) and isinstance(module, DoRALayer)):
        return False
    settings = ["rank", "alpha", "use_rslora", "dropout"] + ["dropout_mode"] * (rule.dropout > 0)
    return all(getattr(module, name) == getattr(rule, name) for name in settings)


def _read_values(layer: Any, source: Folder, adapter: Adapter, exactly: bool) -> dict[str, Tensor]:
    """Returns the folder's tensors for ``layer``; a LoRA folder has no magnitude."""
    values = {}
    for name in ("lora_a", "lora_b"):
        key, parameter = adapter.keys[name], getattr(layer, name)
        value = from_peft(layer, name, source.read(key)).to(parameter.dtype)
        values[name] = source.checked(key, value)
    if key := adapter.keys.get("magnitude"):
        value = values["magnitude"] = from_peft(layer, "magnitude", source.read(key))
        if exactly:
            source.check_not_rounded(key, value, value.to(layer.magnitude.dtype))
    return values


def _set_values(layer: Any, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        shards.fill(getattr(layer, name), value)
    if "magnitude" not in values:
        layer.reset_magnitude()


def _untie(model: nn.Module, name: str) -> None:
    """Gives the parameter ``name`` its own tensor, and its own module if the module is shared."""
    path, _, attribute = name.rpartition(".")
    modules = list(named_modules(model, remove_duplicate=False))
    module = dict(modules)[path]
    if sum(module is other for _, other in modules) > 1:
        module = copy.copy(module)
        module._parameters = dict(module._parameters)
        parent, _, last = path.rpartition(".")
        setattr(dict(modules)[parent], last, module)
    old = getattr(module, attribute)
    new = old.detach().clone()
    setattr(module, attribute, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
