"""Norms that gradient checkpointing does not compute again.

It calls a layer in the forward pass and once more within the backward pass, when nothing has
changed. The first call keeps its norm, f32[out], and the second one copies it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Kept(NamedTuple):
    source: list[Any]
    storages: list[StorageWeakRef]
    norm: Tensor


# By the storage of lora_b. It is dropped soon after the storage is freed.
_KEPT: dict[int, _Kept] = {}
_most = 64


def kept(compute: Callable[[], Tensor], operands: tuple[Tensor, ...], *constants: Any) -> Tensor:
    """Returns ``compute()``, or within a backward pass a copy of what the last call outside has
    computed from the same operands and constants, if none was changed since."""
    if operands[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return compute()  # A graph that is replayed must compute it each time.
    storages = [operand.untyped_storage() for operand in operands]
    # An address may belong to other tensors later. A storage that is still referred to, if weakly,
    # has its own.
    source = [
        (storage._cdata, operand.storage_offset(), operand.shape, operand._version)
        for storage, operand in zip(storages, operands, strict=True)
    ]
    source += constants
    if torch._C._current_graph_task_id() != -1:
        found = _KEPT.get(storages[-1]._cdata)
        if found is None or found.source != source or not _is_alive(found):
            return compute()
        return found.norm.clone()
    norm = compute()
    # The caller's program may use the memory of its norm again.
    references = [StorageWeakRef(storage) for storage in storages]
    _KEPT[storages[-1]._cdata] = _Kept(source, references, norm.clone())
    _drop_freed()
    return norm


def _is_alive(one: _Kept) -> bool:
    return not any(storage.expired() for storage in one.storages)


def _drop_freed() -> None:
    global _most
    if len(_KEPT) > _most:
        for key, one in list(_KEPT.items()):
            if not _is_alive(one):
                _KEPT.pop(key, None)
        _most = 2 * len(_KEPT) + 64
