"""The norm and the adapted projection of tensors that are sharded over processes.

Each process computes with what it holds, by the operators for one device. With the weight's inputs
sharded, what a process has of

    ‖W + sBA‖² = Σ_processes ‖W_p + sBA_p‖²        y = Σ_processes g∘x_p(W_p + sBA_p)ᵀ

is a term of a sum: of the norm, [out] numbers travel; of y, whose epilogue is linear, what travels
for the plain layer too. The bias is in the first process' term alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from torch_dora.ops import shards
from torch_dora.ops.shards import Placements


def norm(
    of_shard: Callable[..., Tensor],
    root: Callable[[Tensor], Tensor],
    weight: Any,
    lora_a: Any,
    lora_b: Any,
) -> Any:
    """Returns ‖weight + scale·lora_b lora_a‖; of DTensors a DTensor [out] that lies as the weight's
    outputs.

    Args:
        of_shard: the norm of plain operands, in the order of the arguments that follow.
        root: the square root of a plain tensor.
        weight, lora_a, lora_b: [out, in], [r, in], [out, r], detached.
    """
    if not shards.is_sharded(weight, lora_a, lora_b):
        return of_shard(weight, lora_a, lora_b)
    from torch.distributed.tensor import Partial

    local = of_shard(*shards.local_matrices(weight, lora_a, lora_b))
    rows = shards.along(weight, 0)
    columns = [getattr(placement, "dim", None) == 1 for placement in weight.placements]
    if not any(columns):
        return shards.joined(local, weight, rows, weight.shape[:1])
    pending = tuple(Partial() if is_in else row for is_in, row in zip(columns, rows, strict=True))
    squares = shards.joined(local.square(), weight, pending, weight.shape[:1])
    total = squares.redistribute(placements=rows).to_local()
    return shards.joined(root(total), weight, rows, weight.shape[:1])


class _Layout(NamedTuple):
    """The placements of an operand, and of its gradient as a process computes it, axis by axis of
    the mesh."""

    placements: Placements
    gradient: Placements


def projection(of_shard: Callable[..., Tensor], *operands: Any) -> Any:
    """Returns the result of an adapted projection; of DTensors a DTensor: a pending sum over the
    axes of the mesh that shard the weight's inputs, as that of the plain layer.

    Args:
        of_shard: the projection of plain operands.
        operands: x, adapter_x [..., in] or None, weight, bias [out] or None, lora_a, lora_b, g.
    """
    if not shards.is_sharded(*operands):
        return of_shard(*operands)
    x, _, weight, bias, lora_a, lora_b, g = operands
    shards.check_alike(x=x, weight=weight, bias=bias, lora_a=lora_a, lora_b=lora_b, g=g)
    layouts, of_y = _layouts(x, weight)
    # Of x, adapter_x, weight, bias, lora_a, lora_b and g.
    names = ("x", "x", "weight", "out", "lora_a", "out", "out")
    local = [
        None if one is None else _local(one, layouts[name])
        for one, name in zip(operands, names, strict=True)
    ]
    if local[3] is not None and not _is_first(weight):
        local[3] = 0 * local[3]
    y = of_shard(*local)
    return shards.joined(y, weight, of_y, (*x.shape[:-1], weight.shape[0]))


def _layouts(x: Any, weight: Any) -> tuple[dict[str, _Layout], Placements]:
    """Returns the layouts of "x", "weight", "lora_a" and "out", which lora_b, g and the bias have;
    and y's placements."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    last = x.ndim - 1
    whole, pending = Replicate(), Partial()
    pairs: dict[str, list[tuple[Any, Any]]] = {"x": [], "weight": [], "lora_a": [], "out": []}
    of_y = []
    for of_x, of_weight in zip(x.placements, weight.placements, strict=True):
        dim = getattr(of_weight, "dim", None)
        if dim == 0:  # the weight's outputs are sharded
            axis = {
                "x": (whole, pending),
                "weight": (of_weight, of_weight),
                "lora_a": (whole, pending),
                "out": (of_weight, of_weight),
            }
            of_y.append(Shard(last))
        elif dim == 1:  # its inputs
            axis = {
                "x": (Shard(last), Shard(last)),
                "weight": (of_weight, of_weight),
                "lora_a": (of_weight, of_weight),
                "out": (whole, pending),
            }
            of_y.append(pending)
        else:
            shards_rows = getattr(of_x, "dim", last) != last
            rows = of_x if shards_rows else whole
            shared = (whole, pending if shards_rows else whole)
            axis = {"x": (rows, rows), "weight": shared, "lora_a": shared, "out": shared}
            of_y.append(rows)
        for name, pair in axis.items():
            pairs[name].append(pair)
    layouts = {
        name: _Layout(tuple(one for one, _ in each), tuple(one for _, one in each))
        for name, each in pairs.items()
    }
    return layouts, tuple(of_y)


def _local(tensor: Any, layout: _Layout) -> Tensor:
    # The redistribution's own gradient takes the sum that a pending one stands for.
    placed = tensor.redistribute(placements=layout.placements)
    return placed.to_local(grad_placements=layout.gradient)


def _is_first(weight: Any) -> bool:
    """Returns whether this process is the first of those that share the weight's inputs."""
    return not any(
        weight.device_mesh.get_local_rank(axis)
        for axis, placement in enumerate(weight.placements)
        if getattr(placement, "dim", None) == 1
    )
