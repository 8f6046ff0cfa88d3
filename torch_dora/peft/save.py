"""A torch model's adapter into a PEFT folder."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dora_common.peft.config import AdapterConfig
from dora_common.peft.describe import Adapted, check_config, config_of, token_rows
from dora_common.peft.fit import fit
from dora_common.peft.folder import check_finite
from dora_common.peft.keys import key_of, parameter_key
from dora_common.peft.layers import refuse_layers
from dora_common.peft.ties import refuse_to_split
from dora_common.peft.writing import check_free, write
from torch_dora.layers import DoRAConv1D
from torch_dora.ops import check
from torch_dora.peft.layers import adapted_modules, layers_of, parameters_of


@torch.no_grad()
def save_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    use_dora: bool = True,
    modules_to_save: Sequence[str] | str = (),
    trainable_token_indices: Mapping[str, Sequence[int]] | Sequence[int] | None = None,
    bias: str = "none",
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
    dtype: torch.dtype | None = None,
    config: AdapterConfig | None = None,
    overwrite: bool = False,
) -> None:
    """Write the adapter of ``model`` as a PEFT folder: adapter_config.json and
    adapter_model.safetensors, which PEFT loads, and computes the same with.

    The folder appears whole or not at all. On several hosts, call this on one.

    Args:
        model: with adapters.
        folder: made if it is not there.
        use_dora: False writes a LoRA adapter, for which every magnitude has to be its norm.
        modules_to_save: ends of the names of modules to store whole; of modules that share a
            weight, all or none.
        trainable_token_indices: rows to store of embeddings, by the ends of their names; or the
            rows alone, where the model has one embedding.
        bias: "none", or the biases to store: "all", or "lora_only" for those of adapted layers.
        base_model_name_or_path, task_type: for whoever reads the folder; PEFT's task types are
            "CAUSAL_LM", "SEQ_CLS" and so on.
        dtype: of lora_a, lora_b and magnitude in the file: float16, bfloat16, float32 or float64;
            by default each has its own.
        config: written as it is instead of one made from the model and the arguments above; it has
            to say the same as the model.
        overwrite: replace an adapter that is in the folder.

    Raises:
        FileExistsError: there is an adapter in the folder, and ``overwrite`` is False.
        ValueError: the model has no adapter, or one that the format cannot express; ``config`` does
            not fit the model; a name matches no module; a number is not finite, or not in
            ``dtype``.
        NotImplementedError: a convolution has groups, dilation or a padding that PEFT does not
            honour.
        TypeError: an argument has the wrong type.
    """
    if dtype is not None and dtype not in check.FLOATS:
        raise TypeError(f"dtype is {dtype!r}; expected torch.float16, bfloat16, float32 or float64")
    check_free(folder, overwrite=overwrite)
    layers = layers_of(model)
    modules = dict(adapted_modules(model))
    if not modules:
        raise ValueError(
            "model has no adapter; expected one with DoRA layers, as torch_dora.apply_dora makes it"
        )
    refuse_layers(layers[name] for name in modules)
    parameters = parameters_of(model)
    adapted = {
        name: Adapted(layers[name], one.rank, one.alpha, one.use_rslora, one.dropout)
        for name, one in modules.items()
    }
    if config is None:
        config = config_of(
            adapted,
            [name for name, _ in model.named_modules()],
            parameters,
            use_dora=use_dora,
            modules_to_save=modules_to_save,
            trainable_token_indices=token_rows(trainable_token_indices, layers.values()),
            bias=bias,
            fan_in_fan_out=any(isinstance(module, DoRAConv1D) for module in modules.values()),
            base_model_name_or_path=base_model_name_or_path,
            task_type=task_type,
        )
    else:
        check_config(config, adapted)
    if not config.use_dora:
        _check_is_lora(modules)
    arrays = {name: id(tensor) for name, tensor in parameters.items()}
    refuse_to_split(config, arrays, modules)
    tensors = _adapter_tensors(modules, adapted, config, dtype)
    for name, rows in (token_rows(config.trainable_token_indices, layers.values()) or {}).items():
        rows_of = parameters[f"{name}.weight"]
        tensors[key_of(name, "tokens")] = _stored(rows_of[list(rows)])
    for name, tensor in parameters.items():
        is_adapted = name.rpartition(".")[0] in modules
        if config.stores(name, of_adapted_layer=is_adapted):
            # A copy: safetensors takes no two tensors in one piece of memory.
            tensors[parameter_key(name, of_adapted_layer=is_adapted)] = _stored(tensor).clone()
    # What is written can be read: the same check as a reader's.
    fit(
        config,
        {key: ("F32", tuple(tensor.shape)) for key, tensor in tensors.items()},
        layers.values(),
        {name: tuple(tensor.shape) for name, tensor in parameters.items()},
        arrays,
    )
    for key, tensor in tensors.items():
        check_finite(key, tensor, f"{tensor.dtype} cannot hold the numbers, or training diverged")
    write(
        folder,
        config,
        lambda path: save_file(tensors, path, metadata={"format": "pt"}),
        overwrite=overwrite,
    )


def _adapter_tensors(
    modules: Mapping[str, Any],
    adapted: Mapping[str, Adapted],
    config: AdapterConfig,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    tensors = {}
    for name, module in modules.items():
        for role, shape in adapted[name].layer.shapes(module.rank).items():
            if role != "magnitude" or config.use_dora:
                tensor = getattr(module, role.replace("embedding_", "lora_"))
                tensors[key_of(name, role)] = _stored(tensor, dtype).reshape(shape)
    return tensors


def _stored(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return tensor.detach().to("cpu", dtype).contiguous()


def _check_is_lora(modules: Mapping[str, Any]) -> None:
    for name, module in modules.items():
        if not torch.equal(module.norm(), module.magnitude):
            raise ValueError(
                f"use_dora is False and the magnitude of {name} is not its norm; expected a LoRA "
                "adapter, as load_adapter makes it of a LoRA folder: pass use_dora=True"
            )
