"""Saves a torch model's adapter as a PEFT folder."""

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.peft.config import AdapterConfig
from dora_common.peft.save import Adapted, Source
from dora_common.rules import listing
from torch_dora.layers import DoRAConv1D, DoRAExperts, dora_layers, named_modules, placement
from torch_dora.ops import check, shards
from torch_dora.peft.layers import architecture, layers_of, parameters_of, to_peft, warn_of_shared


@torch.no_grad()
def save_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    use_dora: bool = True,
    modules_to_save: Sequence[str] | str = (),
    trainable_token_indices: Mapping[str, Sequence[int]] | Sequence[int] | None = None,
    bias: str = "none",
    for_peft: bool = True,
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
    dtype: torch.dtype | None = None,
    config: AdapterConfig | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the adapter of ``model`` as a PEFT folder: adapter_config.json and
    adapter_model.safetensors.

    PEFT loads the folder and computes the same result. A failed call leaves no partial folder. If
    the model is sharded, by FSDP or as DTensors, all processes must call this function, and the
    first one writes. For any other model, call it in one process.

    Args:
        model: a model with adapters.
        folder: created if it does not exist.
        use_dora: False writes a LoRA adapter; every magnitude must then equal its norm.
        modules_to_save: modules to store whole, by the ends of their names; of modules that share a
            weight, name all or none.
        trainable_token_indices: rows of embeddings to store, by the ends of the embeddings' names;
            or just the rows, if the model has one embedding.
        bias: the biases to store: "none", "all", or "lora_only" for those of adapted layers.
        for_peft: False also writes what PEFT cannot read, and torch_dora and jax_dora can: a DoRA
            adapter of packed experts, with magnitudes [experts, out].
        base_model_name_or_path, task_type: stored for readers of the folder; PEFT's task types are
            "CAUSAL_LM", "SEQ_CLS" and so on.
        dtype: the dtype of lora_a, lora_b and magnitude in the file: float16, bfloat16, float32 or
            float64; by default each tensor keeps its own.
        config: written as it is, instead of one built from the model and the arguments above; it
            must agree with the model.
        overwrite: replace an adapter that is in the folder.

    Raises:
        FileExistsError: there is an adapter in the folder, and ``overwrite`` is False.
        ValueError: the model has no adapter, or one that the format cannot express; ``config`` does
            not fit the model; a name matches no module; a parameter that requires a gradient would
            not be stored; a number is not finite, or not in ``dtype``.
        NotImplementedError: a convolution has groups, dilation or a padding that PEFT does not
            respect; packed experts have settings that PEFT refuses; a layer is offloaded by
            accelerate, partitioned by DeepSpeed or on the meta device.
        RuntimeError: writing failed in the first process; raised in the other processes.
        TypeError: an argument has the wrong type.
    """
    source, config = prepare(
        model,
        use_dora=use_dora,
        modules_to_save=modules_to_save,
        trainable_token_indices=trainable_token_indices,
        bias=bias,
        for_peft=for_peft,
        base_model_name_or_path=base_model_name_or_path,
        task_type=task_type,
        dtype=dtype,
        config=config,
    )
    mesh = shards.largest_mesh(model.parameters())
    source.write(
        folder,
        config,
        save_file,
        overwrite=overwrite,
        run=functools.partial(shards.run_on_first, mesh),
    )


@torch.no_grad()
def prepare(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    config: AdapterConfig | None = None,
    **options: Any,
) -> tuple[Source, AdapterConfig]:
    """Returns what :func:`save_adapter` writes. Takes its arguments, and raises its errors except
    those about numbers and files."""
    if dtype is not None:
        check.is_float_dtype("dtype", dtype)
    layers = layers_of(model)
    modules = dict(dora_layers(model))
    if not modules:
        raise ValueError(
            "model has no adapter; expected a model with DoRA layers, as from torch_dora.apply_dora"
        )
    placement.refuse_offloaded(modules.items())
    placement.refuse_meta(
        (f"{name}.{attribute}", getattr(layer, attribute))
        for name, layer in modules.items()
        for attribute in ADAPTER_NAMES
    )
    parameters = parameters_of(model)

    def stored(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        # A copy, since safetensors does not accept two tensors that share memory.
        return shards.full_tensor(tensor).detach().to("cpu", dtype, copy=True).contiguous()

    def read_adapter(name: str, attribute: str) -> Tensor:
        layer = modules[name]
        return to_peft(layer, attribute, stored(getattr(layer, attribute), dtype)).contiguous()

    source = Source(
        architecture=architecture(layers, parameters),
        adapted={
            name: Adapted(layers[name], layer.rank, layer.alpha, layer.use_rslora, layer.dropout)
            for name, layer in modules.items()
        },
        modules=[
            name for name, module in named_modules(model) if not isinstance(module, DoRAExperts)
        ],
        read=lambda name: stored(parameters[name]),
        read_adapter=read_adapter,
        is_lora=lambda name: torch.equal(
            shards.full_tensor(modules[name].norm()), shards.full_tensor(modules[name].magnitude)
        ),
    )
    is_transposed = any(isinstance(module, DoRAConv1D) for module in modules.values())
    options = {"use_dora": True, "fan_in_fan_out": is_transposed} | options
    config = source.config(config, **options)
    _refuse_to_lose(parameters, config, modules)
    warn_of_shared(model, modules.keys())
    return source, config


def _refuse_to_lose(
    parameters: Mapping[str, Tensor], config: AdapterConfig, adapted: Collection[str]
) -> None:
    """Raises ValueError that lists the trainable parameters that would not be stored."""
    paths = {name: name.rpartition(".")[0] for name in parameters}
    stored = {
        id(tensor)
        for name, tensor in parameters.items()
        if config.stores(name, of_adapted_layer=paths[name] in adapted)
        or config.token_indices_of(paths[name])
    }
    trained = [name for name, tensor in parameters.items() if tensor.requires_grad]
    if lost := [name for name in trained if id(parameters[name]) not in stored]:
        raise ValueError(
            "these parameters require a gradient, but would not be stored; name their modules in "
            f"modules_to_save (or pass bias), or call requires_grad_(False) on them:{listing(lost)}"
        )
