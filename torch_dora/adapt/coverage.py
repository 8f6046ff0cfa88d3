"""`coverage`: a table of a model's weights, which tells what is adapted and what can be adapted."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dora_common.coverage import Coverage
from dora_common.rules import OUTPUT_HEADS
from torch_dora.layers import (
    DoRAConv1D,
    DoRAExperts,
    DoRALayer,
    DoRALinear,
    PackedExperts,
    check_is_module,
    layer_class,
    named_modules,
    packed_experts,
    placement,
)
from torch_dora.ops import check
from torch_dora.ops.quantised import is_quantised


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of a model; the attributes are those of `dora_common.coverage.CoveredWeight`."""

    path: str
    shape: tuple[int, ...]
    status: str
    how: str
    is_linear: bool
    merged_bytes: int = 0


def coverage(model: nn.Module) -> Coverage:
    """Returns every weight of two axes or more of ``model``, and whether and how it can be adapted.

        print(torch_dora.coverage(model))

    A weight's path is the one that rules match. A weight that several modules share has one row,
    under its first name. Weights that a module holds as codes in buffers, as those of GPTQ and AWQ,
    are counted by the module's features.

    Args:
        model: a model with or without adapters; its parameters may be on the meta device.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_is_module(model)
    head, found, seen = output_head(model), [], set[int]()
    for name, module in named_modules(model):
        for holder, row in _rows(name, module):
            if id(holder) not in seen and len(row.shape) > 1:
                is_selected = module is not head and row.path.rpartition(".")[2] not in OUTPUT_HEADS
                found.append(dataclasses.replace(row, is_linear=row.is_linear and is_selected))
            seen.add(id(holder))
    return Coverage(tuple(found))


def _rows(name: str, module: Any) -> Iterator[tuple[Any, Weight]]:
    """Yields the weights of one module: what holds each, by which a shared one is known, and its
    row."""

    def row(
        parameter: str, shape: Sequence[int], status: str, how: str, linear: bool = False
    ) -> Any:
        path = ".".join(filter(None, (name, parameter)))
        return Weight(path, tuple(shape), status, how, linear)

    packed = packed_experts(module)
    for parameter, experts in packed.items():
        weight, how = experts.weight, f"packed experts, {experts.extra_repr()}"
        yield weight, row(parameter, weight.shape, "adaptable", how, linear=True)
    kind = type(module) if isinstance(module, DoRALayer) else layer_class(module)
    if kind is not None:
        status = "adapted" if isinstance(module, DoRALayer) else "adaptable"
        base = module.settings if isinstance(module, DoRALayer) else module
        how = type(base).__name__
        if isinstance(base, PackedExperts):
            how = f"packed experts, {base.extra_repr()}"
        elif is_quantised(module.weight):
            how += f", {type(module.weight).__name__}"
        if base is module and (refusal := _refusal(kind, module)):
            status, how = "not adaptable", refusal
        shape = projection_shape(module) or _shape(module.weight)
        yield module.weight, row("", shape, status, how, is_linear(module))
    if isinstance(module, DoRALayer):
        return
    others = {
        parameter: value
        for parameter, value in module._parameters.items()
        if value is not None and parameter not in packed and (kind is None or parameter != "weight")
    }
    for parameter, value in others.items():
        reason = _reason(module, value)
        path = "" if parameter == "weight" else parameter
        yield value, row(path, _shape(value), "not adaptable", reason)
    if kind is None and "weight" not in others and (shape := projection_shape(module)):
        buffers = [one for one, buffer in module._buffers.items() if buffer is not None]
        reason = (
            f"a {type(module).__name__} keeps it in {', '.join([*others, *buffers]) or 'no tensor'}"
        )
        yield module, row("", shape, "not adaptable", reason)


def _shape(parameter: Any) -> tuple[int, ...]:
    """Returns the shape of a parameter; DeepSpeed keeps that of a partition as ``ds_shape``."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _refusal(kind: type[DoRALayer], module: Any) -> str:
    """Returns why no rule can adapt ``module``, or ""."""
    try:
        placement.refuse_partitioned(module.named_parameters(recurse=False))
        kind.check_base(module, getattr(module, "groups", 1), 0.0)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def _reason(module: Any, parameter: Any) -> str:
    """Returns why a parameter that no DoRA layer adapts cannot be adapted."""
    kind = type(module).__name__
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "the MultiheadAttention around it reads it, and never calls its layer"
    if parameter.dtype not in check.FLOATS:
        return f"{parameter.dtype}, which a {kind} dequantises in code of its own"
    if parameter.ndim == 3:
        return (
            f"a {kind} computes with it in code of its own; for a matrix for each expert, set the "
            "module's is_transposed: False for [experts, out, in], True for [experts, in, out]"
        )
    return f"a {kind} computes with it in code of its own"


def is_linear(module: nn.Module) -> bool:
    """Returns whether ``module`` is a projection, or packed experts, that is adapted or can be."""
    kind = type(module) if isinstance(module, DoRALayer) else layer_class(module)
    return kind is not None and issubclass(kind, DoRALinear | DoRAConv1D | DoRAExperts)


def projection_shape(module: Any) -> tuple[int, int] | None:
    """Returns (out, in) of a module that says how many features it projects, whatever holds its
    weight; None for other modules."""
    for names in (("out_features", "in_features"), ("outfeatures", "infeatures")):
        out, width = (getattr(module, name, None) for name in names)
        if isinstance(out, int) and isinstance(width, int) and not any(module.children()):
            return out, width
    return None


def output_head(model: nn.Module) -> nn.Module | None:
    """Returns the output head, if the model has a ``get_output_embeddings`` method."""
    return getattr(model, "get_output_embeddings", lambda: None)()
