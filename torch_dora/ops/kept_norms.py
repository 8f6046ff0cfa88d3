"""Norms of compiled layers that gradient checkpointing does not compute again.

It calls a layer in the forward pass and once more within the backward pass, when nothing has
changed. The first call keeps its norm, f32[out], for the second one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# What each norm was computed from, and the norm, by lora_b.
_KEPT = WeakTensorKeyDictionary()


def kept(
    compute: Callable[[], Tensor], operands: tuple[Tensor, ...], constants: tuple[Any, ...]
) -> Tensor:
    """Returns ``compute()``; within a backward pass what the last call before it computed from the
    same operands and constants, if none was changed since. It is used once."""
    if operands[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return compute()  # A graph that is replayed must compute it each time.
    source = constants, [(operand.data_ptr(), operand._version) for operand in operands]
    if torch._C._current_graph_task_id() != -1:
        known, norm = _KEPT.pop(operands[-1], (None, None))
        return compute() if norm is None or known != source else norm
    norm = compute()
    # The program may use the memory of its norm again.
    _KEPT[operands[-1]] = source, norm.clone()
    return norm
