"""`to_lora`: the best plain LoRA of a trained DoRA adapter."""

import copy

import torch
from torch import Tensor, nn

from dora_common.lora_report import LoRALayer, LoRAReport, check_arguments
from dora_common.peft.folder import check_finite
from torch_dora.adapt.apply import check_model
from torch_dora.adapt.merge import copy_with
from torch_dora.layers import DoRALayer, adapted_layers, placement
from torch_dora.layers.base import parameter_aliases
from torch_dora.ops.shards import fill, full_tensor


@torch.no_grad()
def to_lora[Model: nn.Module](model: Model, rank: int, *, limit: float) -> tuple[Model, LoRAReport]:
    """Returns a copy of ``model`` with the best LoRA of this rank in place of each DoRA adapter,
    and how far each is from it.

        lora, report = torch_dora.to_lora(model, 16, limit=0.05)
        torch_dora.peft.save_adapter(lora, "folder", use_dora=False)

    Every layer's s·BA is the matrix of this rank that is nearest to W' - W, all elements weighted
    equally: the largest singular values of W' - W, which is computed in fp32 (fp64 if a parameter
    is). W' - W has full rank, since the magnitudes scale every row of W. So the error tells which
    part of the adapter a LoRA of this rank cannot express.

    The copy's layers are DoRA layers whose magnitude is their norm, as from a LoRA folder, with
    alpha = rank and fp32 lora_a and lora_b. Its other parameters are in the memory of the model's.

    Args:
        model: a model with adapters.
        rank: of the LoRA, the same in all layers.
        limit: the largest error to accept, ‖(W' - W) - s·BA‖ / ‖W' - W‖ of a layer.

    Returns:
        The copy and a :class:`~dora_common.lora_report.LoRAReport`.

    Raises:
        TypeError: ``model`` is not a module, or wraps one; an argument has the wrong type.
        ValueError: a layer's error is above ``limit``: the message names the layers, their errors
            and the ranks that would do; or the model has no adapter; an argument is out of range;
            numbers are not finite.
        NotImplementedError: FSDP or accelerate's offloading manages a layer's parameters; a
            module's replaced ``forward`` cannot be made to call the copy; parameters are on the
            meta device.
    """
    check_model(model)
    check_arguments(rank, limit)
    layers = adapted_layers(model)
    placement.refuse_unreplaceable(
        layers.items(), "save_adapter, load_adapter into an unsharded model, and convert that"
    )
    placement.refuse_meta((f"{name}.weight", layer.weight) for name, layer in layers.items())
    new, rows = {}, []
    for name, layer in layers.items():
        change = full_tensor(layer.weight_change())
        check_finite(f"the change of {name} by its adapter", change)
        left, values, right = torch.linalg.svd(change, full_matrices=False)
        new[name] = _fresh(layer, rank, change.dtype)
        groups = getattr(layer.settings, "groups", 1)
        _set(new[name], rank // groups, left, values.sqrt(), right)
        values = values.reshape(-1, values.shape[-1]).cpu()
        rows.append(LoRALayer.from_singular_values(name, values, rank, limit=limit, groups=groups))
    report = LoRAReport(int(rank), float(limit), tuple(rows))
    report.check()
    return copy_with(model, layers, new, ("weight", "bias")), report


def _fresh(layer: DoRALayer, rank: int, dtype: torch.dtype) -> DoRALayer:
    """Returns a layer over the base of ``layer`` with a new adapter of scale 1."""
    base = layer.base
    fresh = type(layer).from_base(
        copy.deepcopy(base, parameter_aliases(base)),
        rank=rank,
        alpha=rank,
        dropout=layer.dropout,
        dropout_mode=layer.dropout_mode,
        adapter_dtype=dtype,
        implementation=layer.implementation,
        bwd_qtype=layer.bwd_qtype,
    )
    return fresh.train(layer.training)


def _set(layer: DoRALayer, rank: int, left: Tensor, roots: Tensor, right: Tensor) -> None:
    """Sets the adapter of ``layer`` to the first ``rank`` singular vectors of each matrix."""
    rank_axes = {
        "lora_a": (roots[..., None] * right, -2),
        "lora_b": (left * roots[..., None, :], -1),
    }
    for name, (vectors, axis) in rank_axes.items():
        kept = vectors.narrow(axis, 0, min(rank, vectors.shape[axis]))
        shape = list(kept.shape)
        shape[axis] = rank
        whole = kept.new_zeros(shape)
        whole.narrow(axis, 0, kept.shape[axis]).copy_(kept)
        fill(getattr(layer, name), whole.reshape(layer.adapter_shapes()[name]))
    layer.reset_magnitude()
