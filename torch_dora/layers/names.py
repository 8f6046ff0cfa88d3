"""The modules of a model by their names."""

from collections.abc import Iterator

from torch import nn

from torch_dora.layers.base import DoRALayer

# What torch.distributed's checkpoint_wrapper and offload_wrapper call the module inside.
_WRAPPED = "_checkpoint_wrapped_module"


def named_modules(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yields what ``model.named_modules`` does, under the names of ``model.state_dict``: those
    inside of torch's wrappers of activation checkpointing have the names that they have without."""
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        yield ".".join(one for one in name.split(".") if one != _WRAPPED), module


def dora_layers(model: nn.Module) -> Iterator[tuple[str, DoRALayer]]:
    """Yields the name and the layer of every DoRA layer of ``model``; a shared one once."""
    for name, module in named_modules(model):
        if isinstance(module, DoRALayer):
            yield name, module
