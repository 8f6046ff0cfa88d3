"""torch_dora's layer in several processes: DDP, FSDP2 and DTensor's tensor parallelism."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from parity.sharded import LEARNING_RATE, STEPS, Problem
from torch_dora.ops import sharded, shards

Tensors = dict[str, Tensor]


class Layout(NamedTuple):
    """How a layer is parallel: over rows of the batch by DDP or FSDP, and over the weight's inputs
    or outputs by a style; with both, on a mesh of two axes."""

    rows: str | None = None
    style: Callable[[], ParallelStyle] | None = None

    @property
    def axes(self) -> int:
        return (self.rows is not None) + (self.style is not None)


def _column() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _row() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


LAYOUTS = {
    "one": Layout(),
    "dp": Layout("ddp"),
    "fsdp": Layout("fsdp"),
    "tp column": Layout(style=_column),
    "tp row": Layout(style=_row),
    "fsdp×tp column": Layout("fsdp", _column),
    "fsdp×tp row": Layout("fsdp", _row),
}


def layers(
    inputs: LayerInputs, scale: float, names: Sequence[str], device: str, spoilt: bool = False
) -> list[Tensors]:
    """Returns y and all gradients in every layout that is named, whole. Every process calls this.

    Args:
      spoilt: every process takes the norm of the rows that it has.
    """
    moved: dict[str, Any] = {
        name: None if value is None else value.to(device) for name, value in vars(inputs).items()
    }
    inputs = LayerInputs(**moved)
    with norm_of_a_shard() if spoilt else contextlib.nullcontext():
        return [_layer(inputs, scale, LAYOUTS[name], device) for name in names]


def losses(
    problem: Problem, names: Sequence[str], device: str, spoilt: bool = False
) -> list[list[float]]:
    """Returns the losses of every step of training in every layout that is named; "one" is what one
    device computes. Every process calls this.

    Args:
      spoilt: every process takes the norm of the rows that it has.
    """
    with norm_of_a_shard() if spoilt else contextlib.nullcontext():
        return [_losses(problem, LAYOUTS[name], device) for name in names]


def _losses(problem: Problem, layout: Layout, device: str) -> list[float]:
    inputs, target, unit, scale = problem
    layer, call, over_rows = _adapted(inputs, scale, layout, device)
    with torch.no_grad():
        layer.lora_b.zero_()
        layer.reset_magnitude()
    parts = over_rows.size() if layout.rows else 1
    at = over_rows.get_local_rank() if layout.rows else 0
    x, wanted = (torch.tensor_split(one.to(device), parts)[at] for one in (inputs.x, target))
    trained = [p for p in layer.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=LEARNING_RATE)
    found = []
    for _ in range(STEPS):
        loss = (call(x) - wanted).square().sum() / (unit * target.numel())
        # DDP and FSDP take the mean over their processes where the whole batch's is the sum.
        (parts * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if layout.rows:
            torch.distributed.all_reduce(total, group=over_rows.get_group())
        found.append(total.item())
    return found


def _adapted(
    inputs: LayerInputs, scale: float, layout: Layout, device: str
) -> tuple[Any, Any, DeviceMesh]:
    """Returns the layer with the adapter of `inputs`, what calls it, and the mesh of the rows."""
    processes = torch.distributed.get_world_size()
    if layout.axes == 2:
        mesh = init_device_mesh(device, (2, processes // 2), mesh_dim_names=("rows", "model"))
        over_rows, over_model = mesh["rows"], mesh["model"]
    else:
        over_rows = over_model = init_device_mesh(device, (processes,))
    model: Any = nn.Sequential(_base(inputs))
    if layout.style:
        model = parallelize_module(model, over_model, {"0": layout.style()})
    rank = inputs.lora_a.shape[0]
    torch_dora.apply_dora(model, torch_dora.DoRARule("0", rank, scale * rank))
    layer = model[0]
    if layer.bias is not None:
        layer.bias.requires_grad_(True)
    if layout.rows == "fsdp":
        fully_shard(model, mesh=over_rows)
    for name in ("lora_a", "lora_b", "magnitude"):
        shards.fill(getattr(layer, name), getattr(inputs, name))
    call = nn.parallel.DistributedDataParallel(model) if layout.rows == "ddp" else model
    return layer, call, over_rows


def _layer(inputs: LayerInputs, scale: float, layout: Layout, device: str) -> Tensors:
    layer, call, over_rows = _adapted(inputs, scale, layout, device)
    at = over_rows.get_local_rank() if layout.rows else 0
    share = functools.partial(torch.tensor_split, sections=over_rows.size() if layout.rows else 1)
    x: Any = share(inputs.x)[at].clone().requires_grad_()
    y = call(x)
    # DDP and FSDP take the mean over their processes where the whole batch's gradient is the sum.
    divided = over_rows.size() if layout.rows else 1
    y.backward(divided * share(inputs.dy)[at])
    found = {
        f"d_{name}": shards.whole(p.grad)
        for name, p in layer.named_parameters()
        if p.grad is not None
    }
    found["y"], found["d_x"] = y.detach(), x.grad / divided
    if layout.rows:
        for name in ("y", "d_x"):
            found[name] = _gathered(found[name], over_rows)
    # A style's result may still be on its way; a copy waits for it.
    return {name: value.clone().cpu() for name, value in found.items()}


def _base(inputs: LayerInputs) -> nn.Linear:
    out_features, in_features = inputs.weight.shape
    with torch.device("meta"):
        base = nn.Linear(in_features, out_features, bias=inputs.bias is not None)
    base.weight = nn.Parameter(inputs.weight.clone())
    if inputs.bias is not None:
        base.bias = nn.Parameter(inputs.bias.clone())
    return base


def _gathered(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    parts: list[Any] = [None] * mesh.size()
    torch.distributed.all_gather_object(parts, rows.cpu(), mesh.get_group())
    return torch.cat(parts)


@contextlib.contextmanager
def norm_of_a_shard() -> Iterator[None]:
    """Spoils the norm while it lasts: it is of the inputs that a process has, as some row-parallel
    layers take it. At initialisation, where the magnitude is such a norm, no result tells."""

    def spoilt(of_shard, root, weight, lora_a, lora_b):
        if not shards.is_sharded(weight):
            return of_shard(weight, lora_a, lora_b)
        norm = of_shard(*shards.local_matrices(weight, lora_a, lora_b))
        return shards.joined(norm, weight, shards.along(weight, 0), weight.shape[:1])

    with mock.patch.object(sharded, "norm", spoilt):
        yield
