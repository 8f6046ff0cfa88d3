"""What the tensor-parallel processes of vLLM have to agree on."""

import torch
import torch.distributed
from torch import Tensor
from vllm.distributed import (  # pyright: ignore[reportMissingImports]
    get_tp_group,
    tensor_model_parallel_all_reduce,
)


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
            raise RuntimeError(f"the adapter was refused by {'; '.join(others)}")
    if error is not None:
        raise error


def total(values: Tensor) -> Tensor:
    """Returns the sum of ``values`` over the processes."""
    return tensor_model_parallel_all_reduce(values)
