"""A bank: the adapters of all slots, beside one base model."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dora_common.hyperparameters import ADAPTER_NAMES, adapter_scale
from dora_common.peft.folder import open_folder
from dora_common.rules import ALL_LINEAR, assign, listing
from dora_common.slots import check_plain, check_room, check_sizes, check_slot
from torch_dora.adapt.apply import WRAPPERS, check_model, modules_with_names, output_head
from torch_dora.adapt.rule import DoRARule
from torch_dora.layers import DoRAConv1D, DoRALinear, dora_layers, layer_class, placement
from torch_dora.layers.linear import is_conv1d
from torch_dora.ops import factored_norm, magnitude_scale
from torch_dora.ops.bank import Slots
from torch_dora.ops.dtypes import accumulation_dtype
from torch_dora.ops.quantised import matrix
from torch_dora.ops.shards import whole
from torch_dora.peft.layers import layers_of, outline, parameters_of


class Entry(NamedTuple):
    """An adapter of one projection.

    Attributes:
        lora_a: [rank, in].
        lora_b: [out, rank].
        magnitude: [out]; None for LoRA.
        scale: alpha / rank, or alpha / sqrt(rank).
    """

    lora_a: Tensor
    lora_b: Tensor
    magnitude: Tensor | None
    scale: float


class AdapterBank:
    """Adapters of one model in slots, for rows of one batch: DoRA, LoRA and rsLoRA, of any targets
    and any ranks up to ``max_rank``.

        bank = torch_dora.AdapterBank(model, slots=64, max_rank=64)
        bank.load(0, "adapters/french").load(1, "adapters/code")
        logits = torch_dora.with_bank(model, bank, [0, -1, 1])(tokens)

    Tensors have room for every slot from the start, and :meth:`load` and :meth:`evict` change them
    in place. What an adapter multiplies results by, g = magnitude / ‖W + s·BA‖, is taken when it is
    loaded.

    Args:
        model: the plain base model, which the bank keeps.
        slots: how many adapters there is room for, at least 1.
        max_rank: the largest rank of an adapter, at least 1.
        path: which projections, as :class:`~torch_dora.DoRARule`'s: those that ``apply_dora``
            adapts, such as ``torch.nn.Linear`` and GPT-2's Conv1D; other layers that match are left
            out.

    Raises:
        TypeError: ``model`` is no module, or a number no integer.
        ValueError: the model holds an adapter, a number is below 1, or no projection matches.
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
        placement.refuse_meta((f"{name}.weight", one.weight) for name, one in self.layers.items())
        self.tensors: dict[str, Slots] = {
            name: _empty(layer, self.slots, self.max_rank) for name, layer in self.layers.items()
        }

    def __repr__(self) -> str:
        return (
            f"AdapterBank(slots={self.slots}, max_rank={self.max_rank}, {len(self.layers)} layers)"
        )

    def load(
        self, slot: int, adapter: nn.Module | str | os.PathLike[str], *, name: str | None = None
    ) -> "AdapterBank":
        """Puts an adapter into a slot, in the place of what it held; returns the bank.

        Nothing is changed where it raises.

        Args:
            slot: from 0 to slots - 1.
            adapter: a PEFT folder, or a copy of the model that holds the adapter.
            name: of the adapter, where a folder has several, as
                :func:`torch_dora.peft.load_adapter`'s.

        Raises:
            TypeError: ``slot`` is no integer, or ``adapter`` neither.
            ValueError: ``slot`` is no slot; the adapter's rank exceeds max_rank; it has a layer
                that the bank has no room for, such as an embedding or a convolution, or tensors of
                another shape, or that are not finite; a folder does not fit the model.
            FileNotFoundError, NotADirectoryError: there is no such folder, or a file is missing.
            NotImplementedError: a folder replaces parameters of the base model.
        """
        check_slot(slot, self.slots)
        placement.refuse_sharded(self.layers.items())
        if isinstance(adapter, nn.Module):
            entries = _of_model(adapter)
        elif isinstance(adapter, str | os.PathLike):
            entries = self._of_folder(adapter, name)
        else:
            raise TypeError(
                f"adapter is a {type(adapter).__name__}; expected a PEFT folder, or a model with "
                "DoRA layers"
            )
        for path, entry in entries.items():
            self._check(path, entry)
        g = {path: _g(self.layers[path], entry) for path, entry in entries.items()}
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
        """Empties a slot, if it held an adapter; returns the bank.

        Raises:
            TypeError, ValueError: ``slot`` is no slot.
        """
        check_slot(slot, self.slots)
        with torch.no_grad():
            for tensors in self.tensors.values():
                for tensor in tensors:
                    tensor[slot] = torch.nan if tensor is tensors.g else 0
        return self

    def is_empty(self, slot: int) -> bool:
        """Returns whether a slot holds no adapter."""
        g = next((one.g for one in self.tensors.values() if one.g.numel()), None)
        return g is not None and bool(g[slot, 0].isnan())

    def _of_folder(self, folder: str | os.PathLike[str], name: str | None) -> dict[str, Entry]:
        parameters = parameters_of(self.model)
        with open_folder(folder, "pt", name) as source:
            fit = source.fit_to_bank(outline(layers_of(self.model), parameters))
            self._check_paths(fit.adapters)
            entries = {}
            for path, one in fit.adapters.items():
                key = one.keys.get("magnitude")
                entries[path] = Entry(
                    source.read(one.keys["lora_a"]),
                    source.read(one.keys["lora_b"]),
                    source.read(key).reshape(-1) if key else None,
                    adapter_scale(one.rank, one.alpha, source.config.use_rslora),
                )
        return entries

    def _check_paths(self, paths: Mapping[str, Any]) -> None:
        if others := sorted(paths.keys() - self.layers.keys()):
            raise ValueError(
                f"adapter has a layer {others[0]!r}, which the bank has no room for: expected some "
                "of its projections (embeddings and convolutions are none, and path= says which "
                f"others there are):{listing(self.layers)}"
            )

    def _check(self, path: str, entry: Entry) -> None:
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
                    f"{dtype}; expected finite numbers: take an earlier state of its training"
                )


def _projections(model: nn.Module, path: str) -> dict[str, nn.Module]:
    head = output_head(model)
    found = [
        one
        for one in modules_with_names(model)
        if (kind := layer_class(one[0])) and issubclass(kind, DoRALinear | DoRAConv1D)
    ]
    rule = DoRARule(path, rank=1, alpha=1)
    are_linear = [module is not head for module, _ in found]
    chosen = assign([rule], [names for _, names in found], are_linear)
    return {names[0]: one for (one, names), rule in zip(found, chosen, strict=True) if rule}


def _empty(layer: Any, slots: int, max_rank: int) -> Slots:
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
    return layer.weight.T if is_conv1d(layer) else matrix(layer.weight)


def _g(layer: Any, entry: Entry) -> Tensor | float:
    if entry.magnitude is None:
        return 1.0
    weight = _matrix(layer)
    matrices = (entry.lora_a, entry.lora_b, entry.magnitude)
    lora_a, lora_b, magnitude = (one.detach().to(weight.device) for one in matrices)
    norm = factored_norm(weight.detach(), lora_a, lora_b, entry.scale)
    return magnitude_scale(magnitude, norm, weight.dtype)


def _of_model(model: nn.Module) -> dict[str, Entry]:
    check_model(model, inside=WRAPPERS)
    layers = list(dora_layers(model))
    placement.refuse_offloaded(layers)
    entries = {}
    for name, layer in layers:
        one: Any = layer
        if not isinstance(layer, DoRALinear | DoRAConv1D):
            raise ValueError(
                f"adapter has a layer {name!r}, a {type(layer).__name__}, which a bank has no room "
                "for; expected projections alone"
            )
        tensors = [(f"{name}.{attribute}", getattr(one, attribute)) for attribute in ADAPTER_NAMES]
        placement.refuse_meta(tensors)
        lora_a, lora_b, magnitude = (whole(tensor).detach() for _, tensor in tensors)
        entries[name] = Entry(lora_a, lora_b, magnitude, one.scale)
    if not entries:
        raise ValueError("adapter is a model without DoRA layers; expected one from apply_dora")
    return entries
