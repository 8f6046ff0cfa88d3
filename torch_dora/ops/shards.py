"""Tensors whose parts lie in several processes: torch.distributed.tensor's DTensor.

An adapter lies as its weight does: lora_b [out, r] and magnitude [out] are sharded where the
weight's outputs are, lora_a [r, in] where its inputs are, and the rank never is. What one process
holds is then an adapted layer of its own.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# torch.distributed.tensor takes a second to import, and before somebody has imported it no tensor
# is a DTensor: functions that need it import it themselves.
type Mesh = Any
type Placements = tuple[Any, ...]


def is_sharded(*tensors: Tensor | None) -> bool:
    """Returns whether one of the tensors is a DTensor, whatever its placements."""
    return any(hasattr(tensor, "device_mesh") for tensor in tensors)


def check_alike(**tensors: Tensor | None) -> None:
    """Checks that all tensors are DTensors on one mesh, and that only x is a pending sum."""
    given: dict[str, Any] = {name: one for name, one in tensors.items() if one is not None}
    plain = [name for name, one in given.items() if not is_sharded(one)]
    if plain:
        others = ", ".join(name for name in given if name not in plain)
        raise TypeError(
            f"{', '.join(plain)}: plain, while {others}: a DTensor; expected all to be DTensors. "
            "Call parallelize_module before apply_dora, which places the adapter as the weight "
            "is placed, and let the layer's style, or DTensor.from_local, make x one"
        )
    first, mesh = next((name, one.device_mesh) for name, one in given.items())
    for name, one in given.items():
        if one.device_mesh != mesh:
            raise ValueError(
                f"{name} lies on {one.device_mesh} and {first} on {mesh}; expected one mesh"
            )
        if name != "x" and any(placement.is_partial() for placement in one.placements):
            raise NotImplementedError(
                f"{name} has the placements {one.placements}, a sum that is still to be taken; "
                "expected Shard and Replicate: call redistribute on it"
            )


def along(weight: Any, dim: int) -> Placements:
    """Returns the placements of a tensor that is sharded over axis ``dim`` as ``weight`` is, and
    over no other axis."""
    from torch.distributed.tensor import Replicate

    return tuple(
        placement if getattr(placement, "dim", None) == dim else Replicate()
        for placement in weight.placements
    )


def empty_beside(weight: Any, shape: tuple[int, ...], dim: int | None, dtype: torch.dtype) -> Any:
    """Returns an uninitialised tensor of ``shape`` whose axis ``dim`` is one of ``weight``'s axes
    and lies as that does; plain beside a plain weight, whatever ``dim``."""
    if not is_sharded(weight):
        return torch.empty(shape, dtype=dtype, device=weight.device)
    if dim is None:
        raise NotImplementedError(
            f"base.weight is a DTensor with the placements {weight.placements}; expected a plain "
            "tensor for this kind of layer: only linear layers are adapted under tensor "
            "parallelism. Leave the layer out of parallelize_module's plan, or of the rules"
        )
    local = weight.to_local()
    sizes = list(shape)
    sizes[dim] = local.shape[dim]
    empty = torch.empty(sizes, dtype=dtype, device=local.device)
    return joined(empty, weight, along(weight, dim), shape)


def local_matrices(weight: Any, lora_a: Any, lora_b: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what this process holds of the weight [out, in], and what belongs to it of lora_a
    [r, in] and lora_b [out, r]: the adapter's parts move where they lie otherwise, the weight
    never. Plain tensors are returned as they are."""
    if not is_sharded(weight, lora_a, lora_b):
        return weight, lora_a, lora_b
    check_alike(weight=weight, lora_a=lora_a, lora_b=lora_b)
    lora_a = lora_a.redistribute(placements=along(weight, 1))
    lora_b = lora_b.redistribute(placements=along(weight, 0))
    return weight.to_local(), lora_a.to_local(), lora_b.to_local()


def local_rows(tensor: Any, weight: Any) -> Tensor:
    """Returns the part of ``tensor`` [out] that belongs to this process' rows of ``weight`` [out,
    in]."""
    if not is_sharded(tensor):
        return tensor
    return tensor.redistribute(placements=along(weight, 0)).to_local()


def joined(local: Tensor, like: Any, placements: Placements, shape: Iterable[int]) -> Any:
    """Returns the DTensor of ``shape`` on the mesh of ``like`` whose part here is ``local``."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size(shape)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, placements, shape=shape, stride=strides)


def whole(tensor: Any) -> Tensor:
    """Returns a detached plain tensor with all parts of ``tensor``: all processes call this. A
    plain one is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    # What is offloaded to the CPU is gathered by the mesh's own devices.
    return tensor.detach().to(tensor.device_mesh.device_type).full_tensor()


@torch.no_grad()
def fill(tensor: Any, value: Tensor, *, from_first: bool = False) -> None:
    """Copies the whole ``value`` into ``tensor``: each process its part, of its own value or, with
    ``from_first``, of the mesh's first process'."""
    if not is_sharded(tensor):
        tensor.copy_(value)
        return
    local = tensor.to_local()
    if local.is_meta:
        return
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh = tensor.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    value = value.detach().to(mesh.device_type, tensor.dtype)
    if from_first:
        value = distribute_tensor(value, mesh, everywhere)
    else:
        value = DTensor.from_local(value, mesh, everywhere)
    local.copy_(value.redistribute(placements=tensor.placements).to_local())


def initialize(tensor: Any, draw: Callable[[Tensor], Any]) -> None:
    """Lets ``draw`` fill ``tensor`` in place, by the random numbers of the mesh's first process:
    the numbers do not depend on how the tensor is sharded."""
    if not is_sharded(tensor):
        draw(tensor)
        return
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    draw(value)
    fill(tensor, value, from_first=True)


def placed(tensor: Tensor, like: Any) -> Any:
    """Returns ``tensor``, of ``like``'s shape, lying as ``like`` does; every process has all of a
    plain one."""
    if is_sharded(tensor) or not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    spread = DTensor.from_local(tensor, like.device_mesh, everywhere)
    return spread.redistribute(placements=like.placements)


def mesh_of(tensors: Iterable[Any]) -> Mesh | None:
    """Returns the largest mesh that one of the tensors lies on; None if all are plain."""
    meshes = [tensor.device_mesh for tensor in tensors if is_sharded(tensor)]
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def by_first(mesh: Mesh | None, function: Callable[[], Any]) -> None:
    """Calls ``function`` in the first process of ``mesh``, for which the others wait; without a
    mesh, here."""
    if mesh is None:
        function()
        return
    from torch.distributed.tensor import DTensor, Partial

    failure = None
    if not any(mesh.get_coordinate()):
        try:
            function()
        except Exception as error:
            failure = error
    count = torch.tensor(float(failure is not None), device=mesh.device_type)
    failures = DTensor.from_local(count, mesh, [Partial()] * mesh.ndim).full_tensor()
    if failure is not None:
        raise failure
    if failures.item():
        raise RuntimeError("the first process of the mesh failed; its own error says why")
