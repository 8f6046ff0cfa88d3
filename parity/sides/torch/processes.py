"""Functions of several processes on this host, one a device: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing.spawn import start_processes

# What each process would import again; the server that they are forked from does it once.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch_dora",
)
# A collective that some process does not take part in fails after this.
TIMEOUT = timedelta(seconds=90)


def run(function: Callable[..., Any], processes: int, device: str, *arguments: Any) -> Any:
    """Returns what ``function(*arguments)`` returns in the first of ``processes`` processes, all of
    which call it with torch.distributed set up.

    Args:
      function: of a module, so that a process finds it by its name.
      device: "cpu" or "cuda".
      arguments: whatever torch.save stores.

    Raises:
      torch.multiprocessing.ProcessRaisedException: a process failed; the message has its traceback.
    """
    # Neither JAX's threads nor CUDA's state are in a process that forks from the server.
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, Path(folder) / "arguments")
        start_processes(
            _process, (function, processes, device, folder), processes, start_method="forkserver"
        )
        return torch.load(Path(folder) / "result", weights_only=False)


def _process(rank: int, function: Callable[..., Any], count: int, device: str, folder: str) -> None:
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=TIMEOUT,
        device_id=torch.device(device, rank) if cuda else None,
    )
    try:
        arguments = torch.load(Path(folder) / "arguments", weights_only=False)
        result = function(*arguments)
        if rank == 0:
            torch.save(result, Path(folder) / "result")
    finally:
        torch.distributed.destroy_process_group()
