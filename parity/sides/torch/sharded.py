"""torch_dora's layer in several processes: DDP, FSDP2 and DTensor's tensor parallelism."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import torch_dora
from parity.cases import LayerInputs
from parity.sharded import LAYOUTS, LEARNING_RATE, STEPS, Problem
from parity.sides.torch import processes as launched
from torch_dora.ops import shards

# The style of tensor parallelism by its part of a layout's name.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "tp column": lambda: ColwiseParallel(output_layouts=Replicate()),
    "tp row": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def in_each(
    function: Callable[..., Any],
    names: Sequence[str],
    device: str,
    arguments: tuple[Any, ...],
    processes: int = 4,
) -> list[Any]:
    """Returns the results of a function of this module in every layout of `names`, run in several
    processes; "one" is one device."""
    return launched.run(_in_each, processes, device, function, names, device, arguments)


def _in_each(
    function: Callable[..., Any], names: Sequence[str], device: str, arguments: Any
) -> Any:
    return [function(name, device, *arguments) for name in names]


def layer(name: str, device: str, inputs: LayerInputs, scale: float) -> dict[str, Tensor]:
    """Returns y and all gradients as full tensors."""
    parallel = _Parallel(name, device, inputs, scale)
    x: Any = parallel.share(inputs.x).clone().requires_grad_()
    y = parallel.call(x)
    y.backward(parallel.parts * parallel.share(inputs.dy))
    results = {
        f"d_{name}": shards.full_tensor(p.grad)
        for name, p in parallel.layer.named_parameters()
        if p.grad is not None
    }
    results["y"], results["d_x"] = (
        parallel.gather(rows) for rows in (y.detach(), x.grad / parallel.parts)
    )
    # A result of tensor parallelism may be asynchronous; a copy waits for it.
    return {name: value.clone().cpu() for name, value in results.items()}


def losses(name: str, device: str, problem: Problem) -> list[float]:
    """Returns the loss of every training step."""
    inputs, target, unit, scale = problem
    elements = target.numel()
    parallel = _Parallel(name, device, inputs, scale)
    with torch.no_grad():
        parallel.layer.lora_b.zero_()
        parallel.layer.reset_magnitude()
    x, target = parallel.share(inputs.x), parallel.share(target)
    trained = [p for p in parallel.layer.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=LEARNING_RATE)
    values = []
    for _ in range(STEPS):
        loss = (parallel.call(x) - target).square().sum() / (unit * elements)
        (parallel.parts * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if parallel.parts > 1:
            torch.distributed.all_reduce(total, group=parallel.mesh.get_group())
        values.append(total.item())
    return values


class _Parallel:
    """A layer with the adapter of `inputs` in one layout; every process creates its own instance.

    Attributes:
      call: computes the layer.
      mesh: the processes that share the rows of a batch, if any do.
      parts: the number of parts of the batch. DDP and FSDP average their gradients, but the
        gradient of the whole batch is their sum, so losses are multiplied by this number.
    """

    def __init__(self, name: str, device: str, inputs: LayerInputs, scale: float) -> None:
        if name not in ("one", *LAYOUTS):
            raise ValueError(f"layout is {name!r}; expected one of one, {', '.join(LAYOUTS)}")
        processes = torch.distributed.get_world_size()
        rows, *_ = parts = name.split("×")
        style = STYLES.get(parts[-1])
        if len(parts) == 2:
            mesh = init_device_mesh(device, (2, processes // 2), mesh_dim_names=("rows", "model"))
            self.mesh, over_model = mesh["rows"], mesh["model"]
        else:
            self.mesh = over_model = init_device_mesh(device, (processes,))
        is_split = rows in ("dp", "fsdp")
        self.parts = self.mesh.size() if is_split else 1
        self._part, self._device = self.mesh.get_local_rank() if is_split else 0, device

        has_bias = inputs.bias is not None
        base = nn.Linear(*inputs.weight.shape[::-1], bias=has_bias, device=device)
        base.load_state_dict(
            {"weight": inputs.weight} | ({"bias": inputs.bias} if has_bias else {})
        )
        model: Any = nn.Sequential(base)
        if style:
            model = parallelize_module(model, over_model, {"0": style()})
        rank = inputs.lora_a.shape[0]
        torch_dora.apply_dora(model, torch_dora.DoRARule("0", rank, scale * rank))
        self.layer = model[0]
        if has_bias:
            self.layer.bias.requires_grad_(True)
        if rows == "fsdp":
            fully_shard(model, mesh=self.mesh)
        for name in ("lora_a", "lora_b", "magnitude"):
            shards.fill(getattr(self.layer, name), getattr(inputs, name))
        self.call = nn.parallel.DistributedDataParallel(model) if rows == "dp" else model

    def share(self, rows: Tensor) -> Tensor:
        """Returns this process's part of a batch."""
        return torch.tensor_split(rows.to(self._device), self.parts)[self._part]

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the full batch from every process's part."""
        if self.parts == 1:
            return rows
        parts: list[Any] = [None] * self.parts
        torch.distributed.all_gather_object(parts, rows.cpu(), self.mesh.get_group())
        return torch.cat(parts)
