"""Merges adapters into the weights: plain layers, merged in fp32 and cast once."""

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dora_common.hyperparameters import ADAPTER_NAMES
from dora_common.merge_report import MergedLayer, MergeReport
from dora_common.peft.folder import check_finite
from dora_common.rules import listing
from torch_dora.adapt.apply import check_model
from torch_dora.adapt.whole_saves import warn_for_adapted
from torch_dora.layers import (
    DoRALayer,
    dora_layers,
    fast_path,
    placement,
    record_untied,
    replaced_forward,
    tied_modules,
)
from torch_dora.layers.base import parameter_aliases
from torch_dora.layers.experts import put_parameters_back
from torch_dora.ops.operator import PLAIN
from torch_dora.ops.quantised import as_matrix, dense, is_quantised
from torch_dora.ops.shards import full_tensor, is_sharded

_LOG = logging.getLogger(__name__)


def merge_dora(model: nn.Module, *, return_report: bool = False) -> Any:
    """Returns a copy of ``model`` with plain layers, every adapter merged into its layer's weight.

    Weights are merged in fp32 and cast once to the weight's dtype. For quantised weights
    (bitsandbytes' 4 bits, or torchao's weights in a layer without bias) this is the dtype before
    quantisation: if the model was cast after quantisation, cast the copy too. In bf16 this cast can
    change a weight more than a small adapter does: see ``return_report``.

    ``model`` keeps its adapters. The copy's parameters are its own, but all except the merged
    weights are in the memory of the model's: casting or moving the copy does not change the model,
    but training one of the two changes the other. Parameters of bitsandbytes' classes are shared.
    If a weight was tied to another one (an output head to its embedding), the merged weight is no
    longer tied, and the copy's ``config.tie_word_embeddings`` of a transformers model becomes
    False. A warning names the tied modules, since tying them again would lose one of the two
    weights.

    Args:
        model: a model with adapters.
        return_report: also return a :class:`~dora_common.merge_report.MergeReport`.

    Returns:
        The copy, or the copy and the report.

    Raises:
        TypeError: ``model`` is not a module, or wraps one.
        ValueError: it has no adapter, or one that contains NaN or infinity.
        NotImplementedError: FSDP or accelerate's offloading manages a layer's parameters; a
            module's replaced ``forward`` cannot be made to call the copy; some of a layer's
            tensors are on the meta device, or all are and ``return_report`` is True.
    """
    check_model(model)
    layers = dict(dora_layers(model))
    if not layers:
        raise ValueError("model holds no adapter; expected a model from apply_dora")
    placement.refuse_unreplaceable(
        layers.items(), "save_adapter, load_adapter into an unsharded model, and merge that"
    )
    placement.refuse_partly_meta(layers.items())
    if return_report:
        placement.refuse_meta((f"{name}.weight", layer.weight) for name, layer in layers.items())
    _check_adapters(layers)
    if tied := tied_modules(model):
        _LOG.warning(
            "the merged weights of these layers are no longer tied to others; if they are tied "
            "again, for example by a program that follows the base model's config.json with its "
            "tie_word_embeddings, the model computes a different result:%s",
            listing(f"{name}, tied to {', '.join(others)}" for name, others in tied.items()),
        )
    plain: dict[str, Any] = {name: layer.merge() for name, layer in layers.items()}
    merged = copy_with(model, layers, plain, ("bias",))
    if tied:
        record_untied(merged)
    if not any(is_quantised(parameter) for parameter in merged.parameters()):
        # With this configuration, transformers would quantise the merged model when loading it.
        if (quantizer := getattr(merged, "hf_quantizer", None)) is not None:
            quantizer.remove_quantization_config(merged)
    if not return_report:
        return merged
    rows = (
        _report_row(name, layer.weight, layer.merged_weight(), plain[name].weight)
        for name, layer in layers.items()
    )
    return merged, MergeReport(tuple(rows))


@torch.no_grad()
def _check_adapters(layers: Mapping[str, DoRALayer]) -> None:
    """Raises ValueError if an adapter contains NaN or infinity. The host waits once for all."""
    tensors = {
        f"{name}.{part}".lstrip("."): tensor
        for name, layer in layers.items()
        for part in ADAPTER_NAMES
        if is_sharded(tensor := getattr(layer, part)) or type(tensor) in PLAIN
    }
    # Of numbers this is 0, else NaN. A sum of a DTensor adds up in all processes.
    sums = [full_tensor((one * 0).sum(dtype=torch.float32)) for one in tensors.values()]
    sums = [one.to(sums[0].device) for one in sums if not one.is_meta]
    if sums and any(map(math.isnan, torch.stack(sums).tolist())):
        for key, tensor in tensors.items():
            check_finite(key, full_tensor(tensor))


def copy_with(
    model: nn.Module,
    layers: Mapping[str, DoRALayer],
    new: Mapping[str, nn.Module],
    shared: Sequence[str],
) -> Any:
    """Returns a copy of ``model``, in its memory, with new layers in the place of its adapted ones.

    Args:
        layers: the adapted layers.
        new: the new ones, by the same names.
        shared: the parameters of these that the copy has as the model has them: those that several
            modules share stay one parameter.
    """
    aliases = parameter_aliases(model)
    for name, layer in layers.items():
        for attribute in shared:
            if (parameter := layer._parameters.get(attribute)) is not None:
                new[name]._parameters[attribute] = aliases[id(parameter)]
    copied = copy.deepcopy(
        model, aliases | {id(layer): new[name] for name, layer in layers.items()}
    )
    put_parameters_back(copied)
    replaced_forward.refuse_shared(model, copied, {id(layer) for layer in new.values()})
    fast_path.disable_for_adapted(copied, DoRALayer)
    warn_for_adapted(copied)
    return copied


@torch.no_grad()
def _report_row(path: str, weight: Tensor, merged: Tensor, rounded: Tensor) -> MergedLayer:
    """Returns the report's row of the layer at ``path``: the base weight, the merged one in fp32
    (fp64), and that after the cast."""
    # Under tensor parallelism every process reports on the full weight.
    weight, merged, rounded = full_tensor(weight), full_tensor(merged), full_tensor(rounded)
    weight = dense(as_matrix(weight), merged.dtype).to(merged)
    error = rounded - merged
    measured = {"weight": weight, "merged": merged, "change": merged - weight, "error": error}
    return MergedLayer.from_norms(
        path,
        str(rounded.dtype).removeprefix("torch."),
        **{name: float(tensor.norm()) for name, tensor in measured.items()},
        max_abs=float(error.abs().max()),
    )
