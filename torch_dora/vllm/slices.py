"""How vLLM's linear layers with LoRA cut an adapter: into the packed projections of one layer, and
into the parts of the tensor-parallel processes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn
from vllm.lora import layers as vllm_layers  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers import linear  # pyright: ignore[reportMissingImports]

from torch_dora.vllm.folder import FolderError

Tensors = Any  # one tensor, or a list of tensors, with None for a projection without an adapter

_WRAPPERS = (
    vllm_layers.ColumnParallelLinearWithLoRA,
    vllm_layers.RowParallelLinearWithLoRA,
    vllm_layers.ReplicatedLinearWithLoRA,
)
_FORWARDS = {
    kind.forward
    for kind in (
        linear.ColumnParallelLinear,
        linear.MergedColumnParallelLinear,
        linear.QKVParallelLinear,
        linear.RowParallelLinear,
        linear.ReplicatedLinear,
    )
}


class Part(NamedTuple):
    """The adapter of a range of a layer's outputs, as this process has them.

    Attributes:
      name: the name of the projection.
      rows: the range.
      lora_a: [r, in].
      lora_b: s·B, [out of the range, r].
      magnitude: f32[out of the range].
    """

    name: str
    rows: slice
    lora_a: Tensor
    lora_b: Tensor
    magnitude: Tensor


def refuses(layer: Any) -> str | None:
    """Returns why an adapter of this layer with LoRA cannot be multiplied by g, or None."""
    if not isinstance(layer, _WRAPPERS):
        return f"vLLM serves it by {type(layer).__name__}; expected a linear layer"
    base = layer.base_layer
    if type(base).forward not in _FORWARDS:
        return (
            f"{type(base).__name__} has a forward of its own; expected one of vLLM's linear layers"
        )
    if base.quant_method is None:
        return f"{type(base).__name__} has no quant_method; expected a plain linear layer"
    return None


def called_without_adapters(model: nn.Module) -> set[int]:
    """Returns the ids of the base layers in a model with LoRA that something other than their layer
    with LoRA calls, such as the implementation of latent attention (MLA) its ``kv_b_proj``."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, vllm_layers.BaseLayerWithLoRA):
            continue
        implementation = getattr(module, "impl", None)
        held = [*module.children(), *getattr(implementation, "__dict__", {}).values()]
        found.update(id(one) for one in held if isinstance(one, nn.Module))
    return found


def called_for_some_tokens(model: nn.Module) -> tuple[str, ...]:
    """Returns what names of layers begin with that vLLM calls for a part of a batch: those beside
    experts whose tokens are divided between the tensor-parallel processes."""
    modules = model.named_modules()
    return tuple(f"{name}." for name, one in modules if getattr(one, "is_sequence_parallel", False))


def is_row_parallel(layer: Any) -> bool:
    """Returns whether each process has some of the layer's inputs, and the results are added."""
    return isinstance(layer.base_layer, linear.RowParallelLinear)


def features_out(layer: Any) -> int:
    """Returns the number of outputs of the base layer's product in this process."""
    base = layer.base_layer
    if isinstance(base, linear.ColumnParallelLinear):
        return base.output_size_per_partition
    return base.output_size


def cut(
    names: Sequence[str], layer: Any, lora_a: Tensors, lora_b: Tensors, magnitude: Tensors
) -> list[Part]:
    """Cuts an adapter that vLLM has packed, as its layer does.

    Args:
        names: the names of the projections.
        layer: a layer that :func:`refuses` accepts.
        lora_a, lora_b, magnitude: one tensor, or one of each projection, None if it has no adapter.

    Raises:
        FolderError: a tensor has a wrong length.
    """
    columns: Any = _map(lambda one: one[:, None], magnitude)
    count, sizes = layer.n_slices, _full_sizes(layer)
    if len(names) != count:  # The model's projections are not those of the adapter.
        names = [", ".join(names)] * count
    if isinstance(lora_b, Tensor) and count > 1:
        pieces = [lora_b.split(sizes), columns.split(sizes)]
        lora_a, lora_b, columns = [lora_a] * count, *map(list, pieces)
    elif not isinstance(lora_b, Tensor) and len(lora_b) != count:
        _, columns = layer.expand_packed_lora(lora_a, columns)
        lora_a, lora_b = layer.expand_packed_lora(lora_a, lora_b)
    if isinstance(lora_b, Tensor):
        _check(names, [lora_a], [lora_b], layer, [sum(sizes)])
    else:
        _check(names, lora_a, lora_b, layer, sizes)
    if layer.tp_size > 1:
        if is_row_parallel(layer):  # Its sharded kind has some rows of B; the norm needs all.
            begin = layer.tp_rank * layer.input_size
            lora_a = lora_a[:, begin : begin + layer.input_size]
        else:
            lora_b, columns = layer.slice_lora_b(lora_b), layer.slice_lora_b(columns)
    if isinstance(lora_b, Tensor):
        return [Part(names[0], slice(0, len(lora_b)), lora_a, lora_b, columns[:, 0])]
    return [
        Part(name, rows, a, b, column[:, 0])
        for name, rows, a, b, column in zip(
            names, part_rows(layer), lora_a, lora_b, columns, strict=True
        )
        if b is not None
    ]


def part_rows(layer: Any) -> list[slice]:
    """Returns the outputs of each of the layer's projections in this process."""
    if layer.n_slices == 1:
        return [slice(0, features_out(layer))]
    ends = list(accumulate(layer.output_slices, initial=0))
    return [slice(*ends[i : i + 2]) for i in range(layer.n_slices)]


def slot_rows(layer: Any) -> list[slice]:
    """Returns the outputs that each of the layer's ``lora_b_stacked`` has."""
    if is_row_parallel(layer):
        size = layer.lora_b_stacked[0].shape[2]
        begin = layer.tp_rank * size if size < features_out(layer) else 0
        return [slice(begin, begin + size)]
    ends = list(accumulate((one.shape[2] for one in layer.lora_b_stacked), initial=0))
    return [slice(*ends[i : i + 2]) for i in range(len(ends) - 1)]


def _full_sizes(layer: Any) -> list[int]:
    """Returns the numbers of outputs of the layer's projections in all processes together."""
    base = layer.base_layer
    if isinstance(base, linear.QKVParallelLinear):
        keys = base.total_num_kv_heads * base.head_size
        values = base.total_num_kv_heads * getattr(base, "v_head_size", base.head_size)
        return [base.total_num_heads * base.head_size, keys, values]
    return list(getattr(base, "output_sizes", None) or [base.output_size])


def _check(names: Sequence[str], lora_a: Any, lora_b: Any, layer: Any, sizes: list[int]) -> None:
    inputs = layer.input_size * (layer.tp_size if is_row_parallel(layer) else 1)
    for name, a, b, size in zip(names, lora_a, lora_b, sizes, strict=True):
        if b is not None and (b.shape[0] != size or a.shape[1] != inputs):
            raise FolderError(
                f"{name} is of a layer with {a.shape[1]} inputs and {b.shape[0]} outputs; expected "
                f"{inputs} and {size}, as the model has"
            )


def _map(function: Any, tensors: Tensors) -> Any:
    if isinstance(tensors, Tensor):
        return function(tensors)
    return [None if one is None else function(one) for one in tensors]
