"""A torch model's adapter into a PEFT folder."""

import functools
import os
from collections.abc import Collection, Mapping, Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.peft.config import AdapterConfig
from dora_common.peft.save import Adapted, Source
from dora_common.rules import listing
from torch_dora.layers import DoRAConv1D, dora_layers, named_modules, placement
from torch_dora.ops import check, shards
from torch_dora.peft.layers import layers_of, outline, parameters_of, tell_of_shared


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
    """Writes the adapter of ``model`` as a PEFT folder: adapter_config.json and
    adapter_model.safetensors, which PEFT loads, and computes the same with.

    The folder appears whole or not at all. Of a model that is sharded, by FSDP or as DTensors, all
    processes call this, and the first one writes; of any other, call it in one process.

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
            not fit the model; a name matches no module; a parameter that requires a gradient would
            not be stored; a number is not finite, or not in ``dtype``.
        NotImplementedError: a convolution has groups, dilation or a padding that PEFT does not
            honour; accelerate has offloaded a layer, or it is on the meta device.
        RuntimeError: the process that writes failed, in the others.
        TypeError: an argument has the wrong type.
    """
    if dtype is not None:
        check.is_float_dtype("dtype", dtype)
    layers = layers_of(model)
    modules = dict(dora_layers(model))
    if not modules:
        raise ValueError(
            "model has no adapter; expected one with DoRA layers, as torch_dora.apply_dora makes it"
        )
    placement.refuse_offloaded(modules.items())
    placement.refuse_meta(
        (f"{name}.{attribute}", getattr(one, attribute))
        for name, one in modules.items()
        for attribute in ADAPTER_NAMES
    )
    parameters = parameters_of(model)
    mesh = shards.mesh_of(model.parameters())

    def stored(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        # A copy: safetensors takes no two tensors in one piece of memory.
        return shards.whole(tensor).detach().to("cpu", dtype, copy=True).contiguous()

    source = Source(
        outline=outline(layers, parameters),
        adapted={
            name: Adapted(layers[name], one.rank, one.alpha, one.use_rslora, one.dropout)
            for name, one in modules.items()
        },
        modules=[name for name, _ in named_modules(model)],
        read=lambda name: stored(parameters[name]),
        read_adapter=lambda name, attribute: stored(getattr(modules[name], attribute), dtype),
        is_lora=lambda name: torch.equal(
            shards.whole(modules[name].norm()), shards.whole(modules[name].magnitude)
        ),
    )
    config = source.config(
        config,
        modules_to_save,
        trainable_token_indices,
        use_dora=use_dora,
        bias=bias,
        fan_in_fan_out=any(isinstance(module, DoRAConv1D) for module in modules.values()),
        base_model_name_or_path=base_model_name_or_path,
        task_type=task_type,
    )
    _refuse_to_lose(parameters, config, modules)
    tell_of_shared(model, modules.keys())
    source.write(
        folder, config, save_file, overwrite=overwrite, run=functools.partial(shards.by_first, mesh)
    )


def _refuse_to_lose(
    parameters: Mapping[str, Tensor], config: AdapterConfig, adapted: Collection[str]
) -> None:
    """Raises ValueError that lists what is trained beside the adapters and not stored."""
    paths = {name: name.rpartition(".")[0] for name in parameters}
    stored = {
        id(tensor)
        for name, tensor in parameters.items()
        if config.stores(name, of_adapted_layer=paths[name] in adapted)
        or config.token_indices_of(paths[name])
    }
    trained = [name for name, one in parameters.items() if one.requires_grad]
    if lost := [name for name in trained if id(parameters[name]) not in stored]:
        raise ValueError(
            "these parameters require a gradient, and the folder would be without them; name their "
            "modules in modules_to_save (or pass bias), or call requires_grad_(False) on them:"
            f"{listing(lost)}"
        )
