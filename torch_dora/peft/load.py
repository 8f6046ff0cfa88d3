"""A PEFT folder into a torch model."""

import copy
import functools
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dora_common.hyperparameters import DropoutMode
from dora_common.peft.fit import Adapter, Fit
from dora_common.peft.folder import Folder, opened
from torch_dora.adapt import DoRARule, apply_dora, remove_dora
from torch_dora.ops import check
from torch_dora.peft.layers import ADAPTER, adapted_modules, layers_of, parameters_of

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def load_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    adapter: str | None = None,
    adapter_dtype: torch.dtype | None = None,
    dropout_mode: DropoutMode | None = None,
    implementation: str | None = None,
) -> Any:
    """Put the adapter of a PEFT folder into ``model``, in place.

        model = load_adapter(model, "folder")

    Everything in the folder finds its place before anything is made, and everything is made and
    read before ``model`` is changed. Afterwards the adapter is trainable, and so is what the folder
    holds whole (modules_to_save, biases), which is cast to the model's dtypes; the rest is frozen,
    rows of single tokens (trainable_token_indices) included. A module of modules_to_save whose
    weight is tied to another gets a copy of its own, as in PEFT. What an earlier folder replaced in
    the base model stays as that folder had it.

    A LoRA folder is loaded too: as the DoRA that computes the same, its magnitude equal to its
    norm.

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
        NotImplementedError: the configuration asks for something that is not supported.
        TypeError: an argument or a field of the configuration has the wrong type.
    """
    if adapter_dtype is not None and adapter_dtype not in check.FLOATS:
        raise TypeError(
            f"adapter_dtype is {adapter_dtype!r}; expected torch.float16, bfloat16, float32 or "
            "float64"
        )
    layers = layers_of(model)
    with opened(folder, "pt", adapter) as source:
        parameters = parameters_of(model)
        fit = source.fit(
            list(layers.values()),
            {name: tuple(tensor.shape) for name, tensor in parameters.items()},
            {name: id(tensor) for name, tensor in parameters.items()},
        )
        trainable = {parameter: parameter.requires_grad for parameter in model.parameters()}
        try:
            wholes = _read_parameters(source, fit)
            rows = {name: (list(at), source.read(key)) for name, (key, at) in fit.tokens.items()}
            replacements = _make_layers(
                model,
                source,
                fit,
                adapter_dtype=adapter_dtype,
                dropout_mode=dropout_mode or ("input" if source.config.use_dora else "adapter"),
                implementation=implementation,
            )
        except BaseException:
            for parameter, was in trainable.items():
                parameter.requires_grad_(was)
            raise
    _replace(model, replacements)
    for name in fit.untied:
        _untie(model, name)
    parameters = parameters_of(model)
    with torch.no_grad():
        for name, value in wholes.items():
            parameters[name].copy_(value)
        for name, (indices, values) in rows.items():
            parameters[name][indices] = values.to(parameters[name])
    stored = {
        id(parameters[name])
        for name in wholes
        if source.config.stores(name, of_adapted_layer=name.rpartition(".")[0] in fit.adapters)
    }
    for _, module in adapted_modules(model):
        stored |= {id(getattr(module, name)) for name in ADAPTER}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in stored)
    return model


def _make_layers(
    model: nn.Module,
    source: Folder,
    fit: Fit,
    *,
    adapter_dtype: torch.dtype | None,
    **options: Any,
) -> dict[nn.Module, nn.Module]:
    """A new DoRA layer for every module that the folder has an adapter for, and a base layer for
    every other that has one now. ``model`` itself is not changed."""
    modules = dict(model.named_modules())
    old = {name: modules[name] for name in fit.adapters} | dict(adapted_modules(model))
    shell = remove_dora(_shell(old))
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, one in fit.adapters.items():
        # An embedding reads no activation that could be dropped.
        dropout = 0.0 if one.layer.kind == "embedding" else source.config.lora_dropout
        dtype = adapter_dtype or _dtype(source, one)
        groups.setdefault((one.rank, one.alpha, dropout, dtype), []).append(name)
    rules = [
        DoRARule(
            "|".join(map(re.escape, names)),
            rank=rank,
            alpha=alpha,
            use_rslora=source.config.use_rslora,
            dropout=dropout,
            adapter_dtype=dtype,
            **options,
        )
        for (rank, alpha, dropout, dtype), names in groups.items()
    ]
    new = dict(apply_dora(shell, rules).named_modules())
    for name, one in fit.adapters.items():
        _fill(new[name], source, one, adapter_dtype is None)
    return {module: new[name] for name, module in old.items()}


def _shell(modules: Mapping[str, nn.Module]) -> nn.Module:
    """A model of these modules alone, under their own names."""
    shell = nn.Module()
    for name, module in modules.items():
        *path, last = name.split(".")
        parent = shell
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, module)
    return shell


def _dtype(source: Folder, adapter: Adapter) -> torch.dtype:
    """Of lora_a and lora_b, as they are stored."""
    dtypes = (_DTYPES[source.tensors[adapter.keys[name]][0]] for name in ("lora_a", "lora_b"))
    return functools.reduce(torch.promote_types, dtypes)


@torch.no_grad()
def _fill(layer: Any, source: Folder, adapter: Adapter, exactly: bool) -> None:
    for name in ("lora_a", "lora_b"):
        parameter = getattr(layer, name)
        parameter.copy_(source.read(adapter.keys[name]).reshape(parameter.shape))
    if key := adapter.keys.get("magnitude"):
        value = source.read(key).reshape(-1)
        layer.magnitude.copy_(value)
        kept = layer.magnitude.cpu().to(value.dtype)
        if exactly and value.dtype == torch.float64 and not torch.equal(kept, value):
            raise ValueError(
                f"{source.path}: {key} is F64, and rounded in the magnitude of {adapter.layer.name}"
                "; pass adapter_dtype=torch.float32 if it may"
            )
    else:
        layer.reset_magnitude()


def _read_parameters(source: Folder, fit: Fit) -> dict[str, Tensor]:
    values = {}
    for name, (key, *others) in fit.parameters.items():
        values[name] = source.read(key)
        for other in others:
            if not _same_bits(values[name], source.read(other)):
                raise ValueError(f"{source.path}: {key} and {other} differ; expected one {name}")
    return values


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Also where both are the same NaN."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _untie(model: nn.Module, name: str) -> None:
    """Gives the parameter ``name`` an array of its own, and its module too where it is shared."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if sum(module is one for _, one in model.named_modules(remove_duplicate=False)) > 1:
        module = copy.copy(module)
        module._parameters = dict(module._parameters)
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    old = getattr(module, attribute)
    new = old.detach().clone()
    setattr(module, attribute, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Wherever they stand: a module that is shared stays shared."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])
