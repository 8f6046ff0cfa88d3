"""AdapterBank: slots for many adapters of one base model."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dora_common.hyperparameters import ADAPTER_NAMES, adapter_scale
from dora_common.peft.folder import check_finite, open_folder
from dora_common.rules import ALL_LINEAR, assign, listing
from dora_common.slots import check_plain, check_room, check_sizes, check_slot
from torch_dora.adapt.apply import WRAPPERS, check_model, modules_with_names
from torch_dora.adapt.coverage import output_head
from torch_dora.adapt.rule import DoRARule
from torch_dora.layers import DoRAConv1D, DoRALinear, dora_layers, layer_class, placement
from torch_dora.layers.linear import is_conv1d
from torch_dora.ops import factored_norm, magnitude_scale
from torch_dora.ops.bank import Slots
from torch_dora.ops.dtypes import accumulation_dtype
from torch_dora.ops.quantised import as_matrix
from torch_dora.ops.shards import full_tensor
from torch_dora.peft.layers import architecture, layers_of, parameters_of


class LayerAdapter(NamedTuple):
    """An adapter of one projection: lora_a [rank, in], lora_b [out, rank], magnitude [out] (None
    for LoRA), and scale, alpha / rank or alpha / sqrt(rank)."""

    lora_a: Tensor
    lora_b: Tensor
    magnitude: Tensor | None
    scale: float


class AdapterBank:
    """The adapters of one model in slots, from which the rows of one batch choose.

    The adapters can be DoRA, LoRA and rsLoRA, with any targets and any ranks up to ``max_rank``.

        bank = torch_dora.AdapterBank(model, slots=64, max_rank=64)
        bank.load(0, "adapters/french").load(1, "adapters/code")
        logits = torch_dora.with_bank(model, bank, [0, -1, 1])(tokens)

    The bank allocates tensors for all slots once; :meth:`load` and :meth:`evict` change them in
    place. :meth:`load` also computes the adapter's g = magnitude / ‖W + s·BA‖.

    Args:
        model: the plain base model. The bank keeps a reference to it.
        slots: the number of adapters that fit, at least 1.
        max_rank: the largest rank of an adapter, at least 1.
        path: selects projections as :class:`~torch_dora.DoRARule` does: linear layers that
            ``apply_dora`` adapts, such as ``torch.nn.Linear`` and GPT-2's Conv1D. Other matching
            layers are ignored.

    Raises:
        TypeError: ``model`` is not a module, or a number is not an integer.
        ValueError: the model has an adapter, a number is below 1, or no projection matches.
        NotImplementedError: a projection is sharded, offloaded by accelerate or on the meta device.
    """

    def __init__(
        self, model: nn.Module, slots: int, max_rank: int, *, path: str = ALL_LINEAR
    ) -> None:
        check_model(model, inside=WRAPPERS)
        check_sizes(slots, max_rank)
        check_plain([name for name, _ in dora_layers(model)], "torch_dora")
        self.model, self.slots, self.max_rank = model, int(slots), int(max_rank)
        self.layers: dict[str, Any] = _projections(model, path)
        placement.refuse_offloaded(self.layers.items())
        placement.refuse_sharded(self.layers.items())
        placement.refuse_meta(
            (f"{name}.weight", layer.weight) for name, layer in self.layers.items()
        )
        self.tensors: dict[str, Slots] = {
            name: _empty_slots(layer, self.slots, max_rank) for name, layer in self.layers.items()
        }

    def __repr__(self) -> str:
        return (
            f"AdapterBank(slots={self.slots}, max_rank={self.max_rank}, {len(self.layers)} layers)"
        )

    def load(
        self, slot: int, adapter: nn.Module | str | os.PathLike[str], *, name: str | None = None
    ) -> "AdapterBank":
        """Loads an adapter into a slot, replacing the slot's adapter, and returns the bank.

        If this method raises, nothing has changed.

        Args:
            slot: from 0 to slots - 1.
            adapter: a PEFT folder, or a copy of the model with DoRA layers.
            name: the adapter's name, if a folder has several, as in
                :func:`torch_dora.peft.load_adapter`.

        Raises:
            TypeError: ``slot`` is not an integer, or ``adapter`` is neither a folder nor a model.
            ValueError: there is no such slot; the adapter's rank exceeds max_rank; the adapter has
                a layer that the bank does not cover, such as an embedding or a convolution; a
                tensor has another shape or is not finite; a norm is not finite; a folder does not
                fit the model.
            FileNotFoundError, NotADirectoryError: there is no such folder, or a file is missing.
            NotImplementedError: a folder replaces parameters of the base model.
        """
        check_slot(slot, self.slots)
        placement.refuse_sharded(self.layers.items())
        if isinstance(adapter, nn.Module):
            entries = _read_model(adapter)
        elif isinstance(adapter, str | os.PathLike):
            entries = self._read_folder(adapter, name)
        else:
            raise TypeError(
                f"adapter is a {type(adapter).__name__}; expected a PEFT folder, or a model with "
                "DoRA layers"
            )
        for path, entry in entries.items():
            self._check_entry(path, entry)
        g = {path: _g(path, self.layers[path], entry) for path, entry in entries.items()}
        self.evict(slot)
        with torch.no_grad():
            for path, tensors in self.tensors.items():
                tensors.g[slot] = 1
                if path not in entries:
                    continue
                entry, rank = entries[path], entries[path].lora_a.shape[0]
                tensors.lora_a[slot, :rank] = entry.lora_a.to(tensors.lora_a)
                tensors.lora_b[slot, :rank] = entry.lora_b.mT.to(tensors.lora_b)
                tensors.g[slot] = g[path]
                tensors.scale[slot], tensors.rank[slot] = entry.scale, rank
        return self

    def evict(self, slot: int) -> "AdapterBank":
        """Empties a slot, if it has an adapter, and returns the bank.

        Raises:
            TypeError, ValueError: there is no such slot.
        """
        check_slot(slot, self.slots)
        with torch.no_grad():
            for tensors in self.tensors.values():
                for tensor in tensors:
                    tensor[slot] = torch.nan if tensor is tensors.g else 0
        return self

    def is_empty(self, slot: int) -> bool:
        """Returns whether a slot has no adapter."""
        g = next((tensors.g for tensors in self.tensors.values() if tensors.g.numel()), None)
        return g is not None and bool(g[slot, 0].isnan())

    def _read_folder(
        self, folder: str | os.PathLike[str], name: str | None
    ) -> dict[str, LayerAdapter]:
        parameters = parameters_of(self.model)
        with open_folder(folder, "pt", name) as source:
            destinations = source.bank_destinations(architecture(layers_of(self.model), parameters))
            self._check_paths(destinations.adapters)
            entries = {}
            for path, adapter in destinations.adapters.items():
                key = adapter.keys.get("magnitude")
                entries[path] = LayerAdapter(
                    source.read(adapter.keys["lora_a"]),
                    source.read(adapter.keys["lora_b"]),
                    source.read(key).reshape(-1) if key else None,
                    adapter_scale(adapter.rank, adapter.alpha, source.config.use_rslora),
                )
        return entries

    def _check_paths(self, paths: Mapping[str, Any]) -> None:
        if others := sorted(paths.keys() - self.layers.keys()):
            raise ValueError(
                f"adapter has a layer {others[0]!r}, which the bank does not cover; expected some "
                "of the bank's projections (never embeddings or convolutions; the argument path "
                f"selects them):{listing(self.layers)}"
            )

    def _check_entry(self, path: str, entry: LayerAdapter) -> None:
        self._check_paths({path: entry})
        out, features = _matrix(self.layers[path]).shape
        rank = entry.lora_a.shape[0]
        check_room(rank, path, self.max_rank)
        shapes = {"lora_a": (rank, features), "lora_b": (out, rank), "magnitude": (out,)}
        for name, shape in shapes.items():
            tensor = getattr(entry, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"adapter has {name} {tuple(tensor.shape)} for {path!r}; expected {shape}"
                )
            dtype = getattr(self.tensors[path], name, self.tensors[path].g).dtype
            if not bool(tensor.to(dtype).isfinite().all()):
                raise ValueError(
                    f"adapter has NaN or infinity in {name} of {path!r}, in the bank's dtype "
                    f"{dtype}; expected finite numbers: use an earlier checkpoint of its training"
                )


def _projections(model: nn.Module, path: str) -> dict[str, nn.Module]:
    head = output_head(model)
    candidates = [
        (module, names)
        for module, names in modules_with_names(model)
        if (kind := layer_class(module)) and issubclass(kind, DoRALinear | DoRAConv1D)
    ]
    rule = DoRARule(path, rank=1, alpha=1)
    are_linear = [module is not head for module, _ in candidates]
    rules = assign([rule], [names for _, names in candidates], are_linear)
    return {names[0]: module for (module, names), r in zip(candidates, rules, strict=True) if r}


def _empty_slots(layer: Any, slots: int, max_rank: int) -> Slots:
    weight = _matrix(layer)
    out, features = weight.shape
    like = {"dtype": weight.dtype, "device": weight.device}
    wide = {"dtype": accumulation_dtype(weight), "device": weight.device}
    return Slots(
        lora_a=torch.zeros(slots, max_rank, features, **like),
        lora_b=torch.zeros(slots, max_rank, out, **like),
        g=torch.full((slots, out), torch.nan, **wide),
        scale=torch.zeros(slots, **wide),
        rank=torch.zeros(slots, dtype=torch.int32, device=weight.device),
    )


def _matrix(layer: Any) -> Tensor:
    """Returns a projection's weight as [out, in]."""
    return layer.weight.T if is_conv1d(layer) else as_matrix(layer.weight)


def _g(path: str, layer: Any, entry: LayerAdapter) -> Tensor | float:
    if entry.magnitude is None:
        return 1.0
    weight = _matrix(layer)
    matrices = (entry.lora_a, entry.lora_b, entry.magnitude)
    lora_a, lora_b, magnitude = (tensor.detach().to(weight.device) for tensor in matrices)
    norm = factored_norm(weight.detach(), lora_a, lora_b, entry.scale)
    check_finite(f"the norm of {path!r} with its adapter", norm)
    return magnitude_scale(magnitude, norm, weight.dtype)


def _read_model(model: nn.Module) -> dict[str, LayerAdapter]:
    check_model(model, inside=WRAPPERS)
    layers = list(dora_layers(model))
    placement.refuse_offloaded(layers)
    entries = {}
    for name, layer in layers:
        if not isinstance(layer, DoRALinear | DoRAConv1D):
            raise ValueError(
                f"adapter has a layer {name!r}, a {type(layer).__name__}, which a bank does not "
                "cover; expected linear layers only"
            )
        tensors = [(f"{name}.{kind}", getattr(layer, kind)) for kind in ADAPTER_NAMES]
        placement.refuse_meta(tensors)
        lora_a, lora_b, magnitude = (full_tensor(tensor).detach() for _, tensor in tensors)
        entries[name] = LayerAdapter(lora_a, lora_b, magnitude, layer.scale)
    if not entries:
        raise ValueError("adapter is a model without DoRA layers; expected one from apply_dora")
    return entries
