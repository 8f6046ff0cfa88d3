"""Runs functions in several processes on this host, one per device: gloo on a CPU, NCCL on GPUs."""

import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing.spawn import start_processes

# Imported once, in the fork server, instead of in every process.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch_dora",
)
# A collective fails after this time if a process does not join.
TIMEOUT = timedelta(seconds=90)


def run(function: Callable[..., Any], processes: int, device: str, *arguments: Any) -> Any:
    """Calls ``function(*arguments)`` in every process, with torch.distributed set up, and returns
    the first process's result.

    Args:
      function: a module's function, so that a process can import it by name.
      processes: the number of processes.
      device: "cpu" or "cuda".
      arguments: anything that torch.save can store.

    Raises:
      torch.multiprocessing.ProcessRaisedException: a process failed; the message has its traceback.
    """
    # The fork server has neither JAX's threads nor CUDA's state.
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
