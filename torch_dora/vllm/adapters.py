"""The DoRA adapters of a LoRA manager of vLLM: their g, and the slots that have it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.model_executor.models.utils import (  # pyright: ignore[reportMissingImports]
    PPMissingLayer,
)
from vllm.utils.torch_utils import PIN_MEMORY  # pyright: ignore[reportMissingImports]

from dora_common.rules import listing
from torch_dora.ops import magnitude_scale
from torch_dora.vllm import base_weight, processes, punica, scaling, slices
from torch_dora.vllm.base_weight import BaseWeight
from torch_dora.vllm.batch import Batch
from torch_dora.vllm.folder import FolderError, Layer
from torch_dora.vllm.slices import Part

Parts = Mapping[str, Sequence[Part]]  # by the layer's name


class Adapters:
    """Computes and places g; one object for each LoRA manager.

    Attributes of DoRA adapters, which are vLLM's LoRAModel:
        dora_layers: the layers of the folder, by vLLM's names.
        dora_magnitudes: the magnitude of each layer, or of each of its packed projections.
        dora_scales: g of the outputs of each layer in this process, f32[out] on the host.

    Attributes:
        is_outdated: whether the base weights have changed since the norms were computed.
        replaced: the last request by which each adapter was loaded in place.
    """

    def __init__(self, manager: Any, *, keeps_punica: bool) -> None:
        self.manager = manager
        self.is_outdated = False
        self.replaced: dict[int, Any] = {}
        self._scaled_slots: set[int] = set()
        self._weights: dict[str, BaseWeight] = {}
        self._layers: dict[str, Any] = {}
        self._reasons: dict[str, str] = {}  # why the others cannot have DoRA
        direct = slices.called_without_adapters(manager.model)
        divided = slices.called_for_some_tokens(manager.model)
        language, *encoders = dict.fromkeys(manager.punica_wrapper_mapping.values())
        for name, layer in manager.modules.items():
            reason = slices.refuses(layer)
            if reason is None and id(layer.base_layer) in direct:
                reason = "vLLM computes with the base layer alone; leave it out of the adapter"
            if reason is None and name.startswith(divided):
                reason = (
                    "vLLM calls it for a part of a batch in each process, with the adapters of "
                    "other tokens; leave it out of the adapter, or data parallelism of experts"
                )
            if reason is None and layer.punica_wrapper in encoders:
                reason = (
                    "it is in an encoder, which vLLM calls for some of a batch's images and videos "
                    "at a time, with the adapters of others; leave it out of the adapter"
                )
            if reason is not None:
                self._reasons[name] = reason
            else:
                rows = layer.punica_wrapper._token_lora_indices
                features = slices.features_out(layer)
                scaling.attach(layer.base_layer, manager.lora_slots, features, rows)
                self._layers[name] = layer
        self._ranks = np.full(manager.lora_slots, manager.lora_config.max_lora_rank, np.int32)
        self._keeps_punica = np.full(manager.lora_slots, True)  # for some layers of the adapter
        self._of_punica: list[str] = []
        for wrapper in (language, *encoders):
            wrapper._token_lora_indices.fill_(-1)  # vLLM leaves it uninitialized
        if not keeps_punica:
            self._replace_punica(language)
        self._compile_norms()

    def _compile_norms(self) -> None:
        """Computes a norm of each shape, so that the first adapter does not wait for Triton."""
        seen = set()
        for name, layer in self._layers.items():
            weight = _base_weight(name, layer)
            if weight.weight is None or weight.device.type != "cuda":
                continue  # Others take long to measure, and need no kernel of Triton.
            inputs, dtype = weight.features, self.manager.lora_config.lora_dtype
            for rows in slices.part_rows(layer):
                if (shape := (rows.stop - rows.start, inputs)) not in seen:
                    seen.add(shape)
                    lora_a = torch.zeros(1, inputs, dtype=dtype)
                    lora_b = torch.zeros(shape[0], 1, dtype=dtype)
                    weight.squares([self._operands(weight, rows, lora_a, lora_b)])

    def _replace_punica(self, wrapper: Any) -> None:
        """Gives the layers of a Punica wrapper their kernels."""
        slots, rows = self.manager.lora_slots, wrapper._token_lora_indices
        ours = [one for one in self._layers.values() if one.punica_wrapper is wrapper]
        ours = [one for one in ours if punica.refuses(one) is None]
        if not ours:
            return
        tables = Batch(len(rows), slots, rows.device)
        for layer in ours:
            scales = layer.base_layer.row_scales
            layer.slot_products = punica.SlotProducts(layer, scales.g, tables)
            scales.is_left_to_kernels = True
        punica.warm_up(ours, tables, self._ranks)
        left = {
            name: layer
            for name, layer in self.manager.modules.items()
            if layer.punica_wrapper is wrapper and not hasattr(layer, "slot_products")
        }
        self._of_punica = list(left)
        can_rest = punica.can_rest(wrapper, list(left.values()))
        keeps = self._keeps_punica if can_rest else None
        wrapper.update_metadata = punica.makes_tables(wrapper, tables, self._ranks, keeps)

    def prepare(self, lora: Any, error: Exception | None = None) -> None:
        """Packs a DoRA adapter and computes its g. A LoRA adapter is left as it is.

        All tensor-parallel processes must call this for the same adapters in the same order.

        Args:
            lora: a LoRAModel, or None with an error.
            error: why this process could not load the adapter.

        Raises:
            FolderError: the adapter cannot be served.
            Exception: ``error``.
        """
        parts, squares, is_dora = {}, [], hasattr(lora, "dora_layers")
        if is_dora and error is None:
            try:
                self._find_magnitudes(lora)
                # Packed here, before vLLM makes room for the adapter. It finds nothing left to do.
                self.manager._create_merged_loras_inplace(lora)
                parts = self._parts(lora)
                squares = self._squares(parts)
            except Exception as caught:
                error = caught
        processes.agree(error)
        if is_dora:
            lora.dora_scales = self._scales(parts, squares)

    def place(self, lora: Any, slot: int) -> None:
        """Puts the g of an adapter that vLLM has copied into ``slot`` there too, and its rank."""
        found = (self.manager._get_lora_layer_weights(lora, name) for name in self._layers)
        self._ranks[slot] = max(map(_rank, filter(None, found)), default=0)
        left = (self.manager._get_lora_layer_weights(lora, name) for name in self._of_punica)
        self._keeps_punica[slot] = any(one is not None for one in left)
        self.manager._last_mapping = None  # The tables of the batch hold the ranks.
        scales: Mapping[str, Tensor] = getattr(lora, "dora_scales", {})
        if not scales and slot not in self._scaled_slots:
            return
        for name, layer in self._layers.items():
            g = layer.base_layer.row_scales.g[slot]
            if name not in scales:
                g.fill_(1)
                continue
            g.copy_(scales[name], non_blocking=True)
            if products := getattr(layer, "slot_products", None):  # of all projections
                products.lora_b[slot].mul_(g[:, None])
                continue
            for rows, lora_b in zip(slices.slot_rows(layer), layer.lora_b_stacked, strict=True):
                lora_b[slot, 0].mul_(g[rows, None])
        self._scaled_slots.discard(slot)
        if scales:
            self._scaled_slots.add(slot)

    def renew(self) -> None:
        """Computes all g again, for base weights that have changed, and fills the slots again."""
        self._weights.clear()
        manager = self.manager
        # They may have been loaded after a sleep, which forgets vLLM's tables.
        manager._last_mapping = None
        for wrapper in manager.punica_wrapper_mapping.values():
            wrapper.rests = False
        for _, lora in sorted(manager.list_adapters().items()):
            if not hasattr(lora, "dora_scales"):
                continue
            parts = self._parts(lora)
            lora.dora_scales = self._scales(parts, self._squares(parts))
            if lora.id in manager.lora_index_to_id:
                slot = manager.lora_index_to_id.index(lora.id)
                for name in lora.dora_scales:
                    weights = manager._get_lora_layer_weights(lora, name)
                    manager.modules[name].set_lora(slot, weights.lora_a, weights.lora_b)
                self.place(lora, slot)
        self.is_outdated = False

    def _find_magnitudes(self, lora: Any) -> None:
        """Finds the layers that an adapter is for, before vLLM packs it."""
        if getattr(getattr(self.manager.model, "config", None), "is_encoder_decoder", False):
            raise FolderError(
                "the model has an encoder, whose rows vLLM gives the adapters of the decoder's "
                "tokens; merge the adapter into its model, and serve that as a model of its own"
            )
        manager, unused = self.manager, dict(lora.dora_layers)
        max_rank = manager.lora_config.max_lora_rank
        problems: list[str] = []
        lora.dora_magnitudes = {}

        def magnitude_of(name: str) -> Tensor | None:
            weights = manager._get_lora_layer_weights(lora, name)
            found: Layer | None = weights and unused.pop(weights.module_name, None)
            if not found:
                return None
            if found.rank > max_rank:
                problems.append(
                    f"{found.module}: its rank is {found.rank}, and --max-lora-rank {max_rank}"
                )
            # vLLM 0.25 knows no patterns.
            weights.rank, weights.scaling = found.rank, found.scale
            return found.magnitude

        for name in manager.modules:
            packed = manager.packed_modules.get(name)
            magnitudes = [magnitude_of(one) for one in packed or [name]]
            if all(one is None for one in magnitudes):
                continue
            if name in self._reasons:
                problems.append(f"{name}: {self._reasons[name]}")
            lora.dora_magnitudes[name] = magnitudes if packed else magnitudes[0]
        problems += [
            f"{name}: the model has no such layer, or --lora-target-modules leaves it out"
            for name in unused
            if not self._is_in_other_stage(name)
        ]
        if problems:
            raise FolderError(f"these layers cannot have DoRA:{listing(problems)}")

    def _is_in_other_stage(self, name: str) -> bool:
        """Returns whether a layer is in another stage of a pipeline."""
        module: Any = self.manager.model
        for part in name.split("."):
            module = getattr(module, part, None)
            if isinstance(module, PPMissingLayer):
                return True
        return False

    def _parts(self, lora: Any) -> Parts:
        parts = {}
        for name, magnitude in lora.dora_magnitudes.items():
            weights = self.manager._get_lora_layer_weights(lora, name)
            names = self.manager.packed_modules.get(name, [name])
            tensors = weights.lora_a, weights.lora_b, magnitude
            parts[name] = slices.cut(names, self._layers[name], *tensors)
        return parts

    @torch.no_grad()
    def _squares(self, parts: Parts) -> list[Tensor]:
        """Returns ‖W + sBA‖² of each part, f32[out of the part], over this process's inputs."""
        squares = []
        for name, found in parts.items():
            if name not in self._weights:
                self._weights[name] = _base_weight(name, self._layers[name])
            weight = self._weights[name]
            operands = [self._operands(weight, p.rows, p.lora_a, p.lora_b) for p in found]
            squares += weight.squares(operands)
        return squares

    def _operands(
        self, weight: BaseWeight, rows: slice, lora_a: Tensor, lora_b: Tensor
    ) -> base_weight.Part:
        """Returns A and B on the device; for a kernel of Triton, which is compiled for one rank,
        with the largest rank."""
        lora_a = lora_a.to(weight.device, non_blocking=True)
        lora_b = lora_b.to(weight.device, non_blocking=True)
        more = self.manager.lora_config.max_lora_rank - len(lora_a)
        if more and weight.weight is not None and weight.device.type == "cuda":
            lora_a = nn.functional.pad(lora_a, (0, 0, 0, more))
            lora_b = nn.functional.pad(lora_b, (0, more))
        return rows, lora_a, lora_b

    def _scales(self, parts: Parts, squares: list[Tensor]) -> dict[str, Tensor]:
        flat = [(name, part) for name, found in parts.items() for part in found]
        if not flat:
            return {}
        sums = [i for i, (name, _) in enumerate(flat) if self._is_summed(name)]
        if sums:  # One collective for an adapter.
            sizes = [len(squares[i]) for i in sums]
            totals = processes.total(torch.cat([squares[i] for i in sums])).split(sizes)
            for i, one in zip(sums, totals, strict=True):
                squares[i] = one
        square = torch.cat(squares)
        magnitude = torch.cat([part.magnitude for _, part in flat]).to(square.device)
        is_good = torch.isfinite(square) & (square > 0) & torch.isfinite(magnitude)
        processes.agree(None if bool(is_good.all()) else _bad_norm(flat, squares))
        g = magnitude_scale(magnitude, square.sqrt(), torch.float32).cpu()
        sizes = [slices.features_out(self._layers[name]) for name in parts]
        # Pinned once, since that takes longer than the copies.
        is_pinned = PIN_MEMORY and square.device.type != "cpu"
        ones = torch.empty(sum(sizes), pin_memory=is_pinned).fill_(1)
        result = dict(zip(parts, ones.split(sizes), strict=True))
        for (name, part), values in zip(flat, g.split([len(s) for s in squares]), strict=True):
            result[name][part.rows] = values
        return result

    def _is_summed(self, name: str) -> bool:
        layer = self._layers[name]
        return slices.is_row_parallel(layer) and layer.tp_size > 1


def _rank(weights: Any) -> int:
    """Returns the largest rank of an adapter's layer, which may be packed."""
    lora_a = weights.lora_a
    tensors = [lora_a] if isinstance(lora_a, Tensor) else lora_a
    return max((one.shape[0] for one in tensors if one is not None), default=0)


def _base_weight(name: str, layer: Any) -> BaseWeight:
    base, features = layer.base_layer, layer.input_size
    return BaseWeight(
        name,
        base_weight.readable_weight(base, slices.features_out(layer), features),
        lambda x: scaling.product(base, x),
        features=features,
        dtype=base.params_dtype,
        device=layer.device,
        unit=base_weight.input_unit(base),
    )


def _bad_norm(flat: list[tuple[str, Part]], squares: list[Tensor]) -> FolderError:
    """Returns the error for the first norm that is zero or not finite."""
    for (_, part), square in zip(flat, squares, strict=True):
        tensors = {"lora_A": part.lora_a, "lora_B": part.lora_b, "magnitude": part.magnitude}
        for tensor, values in tensors.items():
            if not bool(torch.isfinite(values).all()):
                return FolderError(
                    f"{tensor} of {part.name} holds NaN or infinity; expected finite numbers: if "
                    "training diverged, use an earlier checkpoint"
                )
        if bad := (~(torch.isfinite(square) & (square > 0))).nonzero().flatten().tolist():
            return FolderError(
                f"the norm of {part.name} with its adapter is {float(square[bad[0]].sqrt())} at "
                f"output {bad[0]} (of {len(bad)} such); expected positive numbers, since its "
                "magnitude is divided by it"
            )
    return FolderError("a norm is zero or not finite in another process")
