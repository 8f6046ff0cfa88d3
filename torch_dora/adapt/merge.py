"""Adapters into the weights: plain layers, merged in fp32 and cast once."""

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dora_common.merge_report import MergedLayer, MergeReport
from dora_common.rules import listing
from torch_dora.adapt.apply import check_model
from torch_dora.layers import (
    DoRALayer,
    dora_layers,
    fast_path,
    named_modules,
    own_forward,
    placement,
)
from torch_dora.ops.quantised import dense, is_quantised, matrix
from torch_dora.ops.shards import whole

_LOG = logging.getLogger(__name__)


def merge_dora(model: nn.Module, *, return_report: bool = False) -> Any:
    """Returns a copy of ``model`` with plain layers, every adapter merged into its layer's weight.

    Merged in fp32 and cast once to the weight's dtype; of bitsandbytes' 4 bits to the one that they
    were quantised from, as of torchao's weights without a bias: cast the copy, too, where the model
    was cast after it was quantised. In bf16 that cast can cost more than a small adapter does:
    ``return_report`` says. ``model`` keeps its adapters and is the way back; the copy
    shares every parameter but the merged weights. A weight that was tied to another one, as a head
    to its embedding, is its layer's own; what it was tied to is logged, since whoever ties them
    again would lose one of the two.

    Args:
        model: with adapters.
        return_report: return a :class:`~dora_common.merge_report.MergeReport` too.

    Returns:
        The copy, or that and the report.

    Raises:
        TypeError: ``model`` is no module, or a wrapper of one.
        ValueError: it holds no adapter.
        NotImplementedError: FSDP or accelerate's offloading holds a layer's parameters; a module
            has a forward of its own that cannot be told to call the copy.
    """
    check_model(model)
    layers = dict(dora_layers(model))
    if not layers:
        raise ValueError("model holds no adapter; expected a model from apply_dora")
    placement.refuse_held(
        layers.items(), "save_adapter, load_adapter into a model that is not sharded, and merge it"
    )
    if untied := _untied(model, layers):
        _LOG.warning(
            "merged weights of these layers are no longer tied to others; tied again, as by "
            "transformers' tie_weights() and by servers that go by config.tie_word_embeddings, "
            "the model computes something else:%s",
            listing(untied),
        )
    plain: dict[str, Any] = {name: layer.merge() for name, layer in layers.items()}
    memo: dict[int, Any] = {id(tensor): tensor for tensor in model.parameters()}
    memo |= {id(layer): plain[name] for name, layer in layers.items()}
    merged = copy.deepcopy(model, memo)
    own_forward.refuse_shared(model, merged, {id(layer) for layer in plain.values()})
    fast_path.avoid(merged, DoRALayer)
    if not any(is_quantised(parameter) for parameter in merged.parameters()):
        # transformers would quantise the model again when it is loaded.
        if (quantizer := getattr(merged, "hf_quantizer", None)) is not None:
            quantizer.remove_quantization_config(merged)
    if not return_report:
        return merged
    rows = (
        _row(name, layer.weight, layer.merged_weight(), plain[name].weight)
        for name, layer in layers.items()
    )
    return merged, MergeReport(tuple(rows))


def _untied(model: nn.Module, layers: Mapping[str, DoRALayer]) -> list[str]:
    """Returns the names of the layers whose weights other modules have too, and of these."""
    owners: dict[int, list[str]] = {}
    for name, module in named_modules(model):
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(name)
    others = {
        name: [one for one in owners.get(id(layer.weight), ()) if one != name]
        for name, layer in layers.items()
    }
    return [f"{name}, tied to {', '.join(found)}" for name, found in others.items() if found]


@torch.no_grad()
def _row(path: str, weight: Tensor, merged: Tensor, rounded: Tensor) -> MergedLayer:
    """Returns a layer's row, from its weight, the merged one in fp32 (fp64), and that as cast."""
    # Under tensor parallelism every process reports on the whole.
    weight, merged, rounded = whole(weight), whole(merged), whole(rounded)
    weight = dense(matrix(weight), merged.dtype).to(merged)
    error = rounded - merged
    measured = {"weight": weight, "merged": merged, "change": merged - weight, "error": error}
    return MergedLayer.from_norms(
        path,
        str(rounded.dtype).removeprefix("torch."),
        **{name: float(one.norm()) for name, one in measured.items()},
        max_abs=float(error.abs().max()),
    )
