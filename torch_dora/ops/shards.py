"""Helpers for torch.distributed.tensor's DTensor, whose parts are in several processes.

An adapter is sharded like its weight: lora_b [out, r] and magnitude [out] like the weight's
outputs, lora_a [r, in] like its inputs. The rank is never sharded. So the local tensors of one
process form an adapted layer too.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# torch.distributed.tensor takes a second to import. Functions that need it import it themselves: no
# tensor is a DTensor before somebody has imported it.
type Mesh = Any
type Placements = tuple[Any, ...]


def is_sharded(*tensors: Tensor | None) -> bool:
    """Returns whether any of the tensors is a DTensor, whatever its placements."""
    return any(hasattr(tensor, "device_mesh") for tensor in tensors)


def check_same_mesh(**tensors: Tensor | None) -> None:
    """Raises an error unless all tensors are DTensors on one mesh, of which only x may be a pending
    sum."""
    given: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    plain = [name for name, tensor in given.items() if not is_sharded(tensor)]
    if plain:
        others = ", ".join(name for name in given if name not in plain)
        raise TypeError(
            f"{', '.join(plain)}: plain, while {others}: a DTensor; expected all to be DTensors. "
            "Call parallelize_module before apply_dora, which shards the adapter like the weight, "
            "and make x a DTensor with the layer's style or DTensor.from_local"
        )
    first, mesh = next((name, tensor.device_mesh) for name, tensor in given.items())
    for name, tensor in given.items():
        if tensor.device_mesh != mesh:
            raise ValueError(
                f"{name} is on {tensor.device_mesh} and {first} on {mesh}; expected one mesh"
            )
        if name != "x" and any(placement.is_partial() for placement in tensor.placements):
            raise NotImplementedError(
                f"{name} has the placements {tensor.placements}, a pending sum; expected Shard and "
                "Replicate: call redistribute on it"
            )


def placements_along(weight: Any, dim: int) -> Placements:
    """Returns the placements of a tensor whose axis ``dim`` is sharded like ``weight``'s axis
    ``dim``, and no other axis."""
    from torch.distributed.tensor import Replicate

    return tuple(
        placement if getattr(placement, "dim", None) == dim else Replicate()
        for placement in weight.placements
    )


def empty_adapter(weight: Any, shape: tuple[int, ...], dim: int | None, dtype: torch.dtype) -> Any:
    """Returns an uninitialised tensor of ``shape`` whose axis ``dim`` is sharded like the same axis
    of ``weight``; for a plain weight, a plain tensor."""
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
    return from_local(empty, weight, placements_along(weight, dim), shape)


def local_matrices(weight: Any, lora_a: Any, lora_b: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns this process's part of the weight [out, in], and the matching parts of lora_a and
    lora_b, which are redistributed if needed, the weight never. Plain tensors are unchanged."""
    if not is_sharded(weight, lora_a, lora_b):
        return weight, lora_a, lora_b
    check_same_mesh(weight=weight, lora_a=lora_a, lora_b=lora_b)
    lora_a = lora_a.redistribute(placements=placements_along(weight, 1))
    lora_b = lora_b.redistribute(placements=placements_along(weight, 0))
    return weight.to_local(), lora_a.to_local(), lora_b.to_local()


def local_rows(tensor: Any, weight: Any) -> Tensor:
    """Returns the part of ``tensor`` [out] for this process's rows of ``weight`` [out, in]."""
    if not is_sharded(tensor):
        return tensor
    return tensor.redistribute(placements=placements_along(weight, 0)).to_local()


def from_local(local: Tensor, like: Any, placements: Placements, shape: Iterable[int]) -> Any:
    """Returns the DTensor of ``shape`` on the mesh of ``like`` whose local part is ``local``."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size(shape)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, placements, shape=shape, stride=strides)


def full_tensor(tensor: Any) -> Tensor:
    """Returns the full ``tensor``, detached and gathered if it is a DTensor: all processes must
    call this. A plain tensor is returned unchanged."""
    if not is_sharded(tensor):
        return tensor
    # A tensor that is offloaded to the CPU is gathered on the mesh's own devices.
    return tensor.detach().to(tensor.device_mesh.device_type).full_tensor()


@torch.no_grad()
def fill(tensor: Any, value: Tensor, *, from_first: bool = False) -> None:
    """Copies the full ``value`` into ``tensor``. Each process takes its part from its own ``value``
    or, with ``from_first``, from that of the mesh's first process."""
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
    """Fills ``tensor`` in place with ``draw``, using the random numbers of the mesh's first
    process. So the numbers do not depend on how the tensor is sharded."""
    if not is_sharded(tensor):
        draw(tensor)
        return
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    draw(value)
    fill(tensor, value, from_first=True)


def place_like(tensor: Tensor, like: Any) -> Any:
    """Returns the full ``tensor`` sharded like ``like``, which has the same shape; all processes
    must have the full tensor."""
    if is_sharded(tensor) or not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    replicated = DTensor.from_local(tensor, like.device_mesh, everywhere)
    return replicated.redistribute(placements=like.placements)


def largest_mesh(tensors: Iterable[Any]) -> Mesh | None:
    """Returns the largest mesh of these tensors, or None if all are plain."""
    meshes = [tensor.device_mesh for tensor in tensors if is_sharded(tensor)]
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def run_on_first(mesh: Mesh | None, function: Callable[[], Any]) -> None:
    """Calls ``function`` in the first process of ``mesh`` while the others wait; without a mesh,
    calls it here."""
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
        raise RuntimeError("the first process of the mesh failed; see the error of that process")
