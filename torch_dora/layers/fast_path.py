"""The fast path of torch.nn.TransformerEncoderLayer, and nested tensors.

In evaluation, the fast path reads the weights of the feed-forward layers without calling these
layers, so their adapters would have no effect.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def disable_for_adapted(model: nn.Module, *kinds: type[nn.Module]) -> None:
    """Disables the fast path in those encoder layers of ``model`` that contain a module of one of
    ``kinds``; other encoder layers keep it."""
    encoders = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
    for module in model.modules():
        if not isinstance(module, encoders):
            continue
        is_adapted = any(isinstance(child, kinds) for child in module.modules())
        if isinstance(module, nn.TransformerEncoderLayer):
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is _disable_fast_path]:
                del hooks[key]
            if is_adapted:
                module.register_forward_pre_hook(_disable_fast_path)
        else:
            # With the fast path's option the encoder turns a masked input into a nested tensor.
            # Attention does not accept one when a gradient is needed.
            original = vars(module).pop("_original_use_nested_tensor", module.use_nested_tensor)
            module.use_nested_tensor = original and not is_adapted
            if is_adapted:
                module._original_use_nested_tensor = original


def _disable_fast_path(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Does nothing: torch does not use the fast path of a module that has a hook."""


def call_on_nested(call: Callable[[Tensor], Tensor], x: Any) -> Tensor:
    """Returns ``call(x)`` for a nested tensor x [batch, rows of each example, in]."""
    lengths = [len(rows) for rows in x.unbind()]
    y = call(x.to_padded_tensor(0.0))
    rows = [rows[:length] for rows, length in zip(y, lengths, strict=True)]
    if x.layout == torch.jagged and x.lengths() is None:
        # Two jagged tensors can be added only if they share their offsets.
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), x.offsets())
    return torch.nested.as_nested_tensor(rows, layout=x.layout)
