"""The fast path of torch.nn.TransformerEncoderLayer, which in evaluation reads the weights of the
feed-forward's layers and calls none of them: their adapters would do nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def avoid(model: nn.Module, *kinds: type[nn.Module]) -> None:
    """Makes the encoder layers of ``model`` that hold a module of one of ``kinds`` call it; others
    take the fast path as torch does."""
    encoders = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
    for module in model.modules():
        if not isinstance(module, encoders):
            continue
        holds = any(isinstance(one, kinds) for one in module.modules())
        if isinstance(module, nn.TransformerEncoderLayer):
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is _hook]:
                del hooks[key]
            if holds:
                module.register_forward_pre_hook(_hook)
        else:
            # It would nest a masked input, of which attention takes none beside a gradient.
            nests = vars(module).pop("_nests_without_adapters", module.use_nested_tensor)
            module.use_nested_tensor = nests and not holds
            if holds:
                module._nests_without_adapters = nests


def _hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Does nothing: torch leaves the fast path for any hook."""


def of_nested(call: Callable[[Tensor], Tensor], x: Any) -> Tensor:
    """Returns ``call`` of a nested tensor [batch, rows of each, in]."""
    lengths = [len(rows) for rows in x.unbind()]
    y = call(x.to_padded_tensor(0.0))
    rows = [rows[:length] for rows, length in zip(y, lengths, strict=True)]
    if x.layout == torch.jagged and x.lengths() is None:
        # Only those that share their offsets can be added to each other.
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), x.offsets())
    return torch.nested.as_nested_tensor(rows, layout=x.layout)
