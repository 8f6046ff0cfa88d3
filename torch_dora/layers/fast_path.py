"""The fast path of torch.nn.TransformerEncoderLayer, which in evaluation reads the weights of the
feed-forward's layers and calls none of them: their adapters would do nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def avoid(model: nn.Module, *kinds: type[nn.Module]) -> None:
    """Makes the encoder layers of ``model`` that hold a module of one of ``kinds`` call it; others
    take the fast path as torch does."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is _hook]:
                del hooks[key]
            if any(isinstance(one, kinds) for one in module.modules()):
                module.register_forward_pre_hook(_hook)


def _hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Does nothing: torch leaves the fast path for any hook."""


def of_nested(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns ``call`` of a nested tensor [batch, rows of each, in], such as
    torch.nn.TransformerEncoder makes of a masked one."""
    lengths = [len(rows) for rows in x.unbind()]
    y = call(x.to_padded_tensor(0.0))
    rows = [rows[:length] for rows, length in zip(y, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=x.layout)
