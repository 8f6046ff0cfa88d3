"""What the tensor-parallel processes of vLLM have to agree on."""

from typing import Any

import torch
import torch.distributed
from torch import Tensor
from vllm.distributed import (  # pyright: ignore[reportMissingImports]
    get_tp_group,
    tensor_model_parallel_all_reduce,
)

_MARK = "was_agreed_on"


def agree(error: Exception | None) -> None:
    """Raises ``error``, or an error if another process has one.

    All processes must call this. If one alone refused an adapter, the others would wait for it.
    """
    group = get_tp_group()
    if group.world_size > 1:
        messages: list[str | None] = [None] * group.world_size
        own = None if error is None else f"{type(error).__name__}: {error}"
        torch.distributed.all_gather_object(messages, own, group=group.cpu_group)
        others = [f"process {rank}: {text}" for rank, text in enumerate(messages) if text]
        if error is None and others:
            error = RuntimeError(f"the adapter was refused by {'; '.join(others)}")
        if error is not None:
            setattr(error, _MARK, True)
    if error is not None:
        raise error


def is_told(error: Exception, parallel_config: Any) -> bool:
    """Returns whether another process tells vLLM of an error that all have agreed on.

    vLLM's own processes answer one after another, and it reads no more answers after the first
    error: those of the others would be taken for answers to its next question. So the last one
    tells it.
    """
    is_agreed = any(hasattr(one, _MARK) for one in (error, error.__cause__))
    has_one_group = parallel_config.world_size == parallel_config.tensor_parallel_size
    is_waiting = parallel_config.distributed_executor_backend == "mp" and has_one_group
    return is_agreed and is_waiting and not get_tp_group().is_last_rank


def total(values: Tensor) -> Tensor:
    """Returns the sum of ``values`` over the processes."""
    return tensor_model_parallel_all_reduce(values)
