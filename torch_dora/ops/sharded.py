"""The norm and the adapted projection for DTensors, which are sharded over processes.

Each process runs the operators for one device on its local tensors. If the weight's inputs are
sharded, the local results are terms of a sum over processes:

    ‖W + sBA‖² = Σ_processes ‖W_p + sBA_p‖²        y = Σ_processes g∘x_p(W_p + sBA_p)ᵀ

The norm communicates [out] numbers. y is linear in the products, so it communicates no more than
the plain layer. Only the first process adds the bias.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from torch_dora.ops import shards
from torch_dora.ops.shards import Placements


def norm(
    compute_local: Callable[..., Tensor],
    root: Callable[[Tensor], Tensor],
    weight: Any,
    lora_a: Any,
    lora_b: Any,
) -> Any:
    """Returns ‖weight + scale·lora_b lora_a‖ by the norm of plain tensors and their square root;
    for DTensors a DTensor [out], sharded like the weight's outputs."""
    if not shards.is_sharded(weight, lora_a, lora_b):
        return compute_local(weight, lora_a, lora_b)
    from torch.distributed.tensor import Partial

    local = compute_local(*shards.local_matrices(weight, lora_a, lora_b))
    rows = shards.placements_along(weight, 0)
    columns = [getattr(placement, "dim", None) == 1 for placement in weight.placements]
    if not any(columns):
        return shards.from_local(local, weight, rows, weight.shape[:1])
    pending = tuple(Partial() if is_in else row for is_in, row in zip(columns, rows, strict=True))
    squares = shards.from_local(local.square(), weight, pending, weight.shape[:1])
    total = squares.redistribute(placements=rows).to_local()
    return shards.from_local(root(total), weight, rows, weight.shape[:1])


class _Layout(NamedTuple):
    """The placements of an operand and of its local gradient, per mesh axis."""

    placements: Placements
    gradient: Placements


def projection(compute_local: Callable[..., Tensor], *operands: Any) -> Any:
    """Returns the result of an adapted projection by that of plain operands. For DTensors it is a
    DTensor, as for the plain layer: a pending sum over the mesh axes that shard the weight's
    inputs. The operands are x, adapter_x [..., in] or None, weight, bias [out] or None, lora_a,
    lora_b, g."""
    if not shards.is_sharded(*operands):
        return compute_local(*operands)
    x, _, weight, bias, lora_a, lora_b, g = operands
    shards.check_same_mesh(x=x, weight=weight, bias=bias, lora_a=lora_a, lora_b=lora_b, g=g)
    layouts, y_placements = _layouts(x, weight)
    # The layouts of x, adapter_x, weight, bias, lora_a, lora_b and g.
    names = ("x", "x", "weight", "out", "lora_a", "out", "out")
    local = [
        None if operand is None else _local(operand, layouts[name])
        for operand, name in zip(operands, names, strict=True)
    ]
    if local[3] is not None and not _is_first_of_inputs(weight):
        local[3] = 0 * local[3]
    y = compute_local(*local)
    return shards.from_local(y, weight, y_placements, (*x.shape[:-1], weight.shape[0]))


def _layouts(x: Any, weight: Any) -> tuple[dict[str, _Layout], Placements]:
    """Returns the layouts of "x", "weight", "lora_a" and "out" (for lora_b, g and the bias), and
    y's placements."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    last = x.ndim - 1
    replicated, pending = Replicate(), Partial()
    pairs: dict[str, list[tuple[Any, Any]]] = {"x": [], "weight": [], "lora_a": [], "out": []}
    y_placements = []
    for x_placement, placement in zip(x.placements, weight.placements, strict=True):
        dim = getattr(placement, "dim", None)
        # (placement of the operand, placement of its gradient)
        if dim == 0:  # the weight's outputs are sharded
            axis = {
                "x": (replicated, pending),
                "weight": (placement, placement),
                "lora_a": (replicated, pending),
                "out": (placement, placement),
            }
            y_placements.append(Shard(last))
        elif dim == 1:  # the weight's inputs are sharded
            axis = {
                "x": (Shard(last), Shard(last)),
                "weight": (placement, placement),
                "lora_a": (placement, placement),
                "out": (replicated, pending),
            }
            y_placements.append(pending)
        else:  # the weight is replicated
            shards_rows = getattr(x_placement, "dim", last) != last
            rows = x_placement if shards_rows else replicated
            shared = (replicated, pending if shards_rows else replicated)
            axis = {"x": (rows, rows), "weight": shared, "lora_a": shared, "out": shared}
            y_placements.append(rows)
        for name, pair in axis.items():
            pairs[name].append(pair)
    layouts = {name: _Layout(*zip(*rows, strict=True)) for name, rows in pairs.items()}
    return layouts, tuple(y_placements)


def _local(tensor: Any, layout: _Layout) -> Tensor:
    # The gradient of redistribute reduces a pending sum.
    redistributed = tensor.redistribute(placements=layout.placements)
    return redistributed.to_local(grad_placements=layout.gradient)


def _is_first_of_inputs(weight: Any) -> bool:
    """Returns whether this process has the first shard of the weight's inputs."""
    return not any(
        weight.device_mesh.get_local_rank(axis)
        for axis, placement in enumerate(weight.placements)
        if getattr(placement, "dim", None) == 1
    )
