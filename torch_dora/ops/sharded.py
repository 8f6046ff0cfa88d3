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
    """Returns ‖weight + scale·lora_b lora_a‖ as a DTensor [out] that lies as the weight's outputs.

    Args:
        of_shard: the norm of plain operands, in the order of the arguments that follow.
        root: the square root of a plain tensor.
        weight, lora_a, lora_b: [out, in], [r, in], [out, r], detached.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`torch_dora.ops.shards.check_alike`.
    """
    from torch.distributed.tensor import Partial

    matrices = shards.local_matrices(weight, lora_a, lora_b)
    local = of_shard(*matrices)
    rows = shards.along(weight, 0)
    columns = [getattr(placement, "dim", None) == 1 for placement in weight.placements]
    if not any(columns):
        return shards.joined(local, weight, rows, weight.shape[:1])
    pending = tuple(Partial() if is_in else row for is_in, row in zip(columns, rows, strict=True))
    squares = shards.joined(local.square(), weight, pending, weight.shape[:1])
    total = squares.redistribute(placements=rows).to_local()
    return shards.joined(root(total), weight, rows, weight.shape[:1])


class _Layout(NamedTuple):
    """How an operand lies, and how its gradient does as a process computes it, axis by axis of the
    mesh."""

    placements: Placements
    gradient: Placements


class _Layouts(NamedTuple):
    x: _Layout
    weight: _Layout
    lora_a: _Layout
    rows: _Layout
    """Of lora_b, g and the bias."""
    y: Placements


def projection(
    of_shard: Callable[..., Tensor],
    x: Any,
    adapter_x: Any,
    weight: Any,
    bias: Any,
    lora_a: Any,
    lora_b: Any,
    g: Any,
) -> Any:
    """Returns the result of an adapted projection, a DTensor: a pending sum over the axes of the
    mesh that shard the weight's inputs, as that of the plain layer.

    Args:
        of_shard: the projection of plain operands, in the order of the arguments that follow.
        x, adapter_x: [..., in]; adapter_x may be None.
        weight, bias, lora_a, lora_b, g: [out, in], [out] or None, [r, in], [out, r], [out].

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`torch_dora.ops.shards.check_alike`.
    """
    shards.check_alike(x=x, weight=weight, bias=bias, lora_a=lora_a, lora_b=lora_b, g=g)
    layouts = _layouts(x, weight)
    if bias is not None:
        bias = _local(bias, layouts.rows)
        if not _is_first(weight):
            bias = 0 * bias
    y = of_shard(
        _local(x, layouts.x),
        None if adapter_x is None else _local(adapter_x, layouts.x),
        _local(weight, layouts.weight),
        bias,
        _local(lora_a, layouts.lora_a),
        _local(lora_b, layouts.rows),
        _local(g, layouts.rows),
    )
    return shards.joined(y, weight, layouts.y, (*x.shape[:-1], weight.shape[0]))


def _layouts(x: Any, weight: Any) -> _Layouts:
    from torch.distributed.tensor import Partial, Replicate, Shard

    last = x.ndim - 1
    whole, pending = Replicate(), Partial()
    found = []
    for of_x, of_weight in zip(x.placements, weight.placements, strict=True):
        dim = getattr(of_weight, "dim", None)
        if dim == 0:
            one = (whole, pending), (of_weight, of_weight), (whole, pending), (of_weight,) * 2
            found.append((*one, Shard(last)))
        elif dim == 1:
            inputs = Shard(last)
            one = (inputs, inputs), (of_weight, of_weight), (of_weight,) * 2, (whole, pending)
            found.append((*one, pending))
        else:
            shards_rows = getattr(of_x, "dim", last) != last
            rows = of_x if shards_rows else whole
            shared = (whole, pending if shards_rows else whole)
            found.append(((rows, rows), shared, shared, shared, rows))
    *operands, y = zip(*found, strict=True)
    return _Layouts(*(_Layout(*zip(*one, strict=True)) for one in operands), y=y)


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
