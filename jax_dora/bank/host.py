"""Reads adapters into host memory, checked and in the layout of a bank."""

import dataclasses
import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from dora_common.hyperparameters import adapter_scale
from dora_common.peft.folder import open_folder
from dora_common.rules import listing
from jax_dora.adapt.adapter import Adapter, rules_by_path
from jax_dora.adapt.inventory import find_weights
from jax_dora.adapt.weight import AdaptableWeight
from jax_dora.bank.projections import rejection_reason
from jax_dora.layers.stack import Stack, stack_axes_of
from jax_dora.ops.bank_slots import RANKS
from jax_dora.ops.dtypes import accumulation_dtype
from jax_dora.peft.named_model import named_model
from jax_dora.peft.names import Names


@dataclasses.dataclass(frozen=True)
class LayerAdapter:
    """The adapter of one layer: lora_a [rank, in], lora_b [rank, out], magnitude [out] (None for
    LoRA), and scale, alpha / rank or alpha / sqrt(rank)."""

    lora_a: np.ndarray
    lora_b: np.ndarray
    magnitude: np.ndarray | None
    scale: float


@dataclasses.dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory, in the layout of a bank.

    `AdapterBank.read` returns it, and `AdapterBank.load` loads it without further preparation.

    Attributes:
      rank_blocks: lora_a and lora_b by path, concatenated to [*stack, RANKS, in + out]. The first
        block has ranks 0 to 7, the second ranks 8 to 15, and so on. A block lacks the paths with
        smaller ranks. All blocks have the same shapes, so that one compiled program writes
        adapters of every rank.
      scalings: everything else, for every path of the bank.
      rank: the largest rank.
      cached_g: the g from the last load.
    """

    rank_blocks: tuple[Mapping[str, np.ndarray], ...]
    scalings: Mapping[str, "Scaling"]
    rank: int
    cached_g: "CachedG" = dataclasses.field(default_factory=lambda: CachedG(), compare=False)

    @functools.cached_property
    def nbytes(self) -> int:
        """The size in host memory in bytes, with g, which the first load caches."""
        g = sum(scaling.numerator.nbytes for scaling in self.scalings.values())
        return g + sum(array.nbytes for array in self._arrays())

    @functools.cached_property
    def digest(self) -> bytes:
        """A hash of the adapter, by which two adapters for one bank can be compared."""
        digest = hashlib.sha256()
        for array in self._arrays():
            digest.update(array.tobytes())
        return digest.digest()

    def _arrays(self) -> Iterator[np.ndarray]:
        for block in self.rank_blocks:
            yield from block.values()
        for scaling in self.scalings.values():
            yield from scaling

    def scalings_for(self, kernels: Any) -> dict[str, "Scaling"]:
        """Returns the scalings for a load into the bank of a model with these kernels.

        If g is cached for these kernels, then it takes the place of the magnitudes, and `is_dora`
        is False everywhere, so that no norm is computed.
        """
        g = self.cached_g.get(kernels)
        if g is None:
            return dict(self.scalings)
        return {
            path: Scaling(g[path], np.zeros_like(scaling.is_dora), scaling.scale, scaling.rank)
            for path, scaling in self.scalings.items()
        }


class CachedG:
    """Caches the g of an adapter in host memory, so that loading it again computes no norm. g
    depends on the base model's kernels, and is valid only for the same arrays."""

    def __init__(self) -> None:
        # The kernels and g are replaced together, since several threads may load an adapter into
        # the banks of different models.
        self._entry: tuple[list[weakref.ref[Any]], Mapping[str, Any]] = [], {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["CachedG"], tuple[()]]:
        """Copies and pickles nothing of the cache, which belongs to arrays of this process."""
        return CachedG, ()

    def get(self, kernels: Any) -> Mapping[str, np.ndarray] | None:
        """Returns g by path, or None if it is not cached for exactly these arrays."""
        references, g = self._entry
        known, arrays = [reference() for reference in references], jax.tree.leaves(kernels)
        if len(known) != len(arrays) or any(a is not b for a, b in zip(known, arrays, strict=True)):
            return None
        return {path: np.asarray(array) for path, array in g.items()}

    def store(self, kernels: Any, g: Mapping[str, jax.Array]) -> None:
        """Stores g for these kernels, and starts its transfer to the host."""
        for array in g.values():
            array.copy_to_host_async()
        with self._lock:
            self._entry = [weakref.ref(array) for array in jax.tree.leaves(kernels)], g

    def has_transferred(self) -> bool:
        """Returns whether g has arrived in host memory; if so, frees it on the device."""
        entry = references, g = self._entry
        if not all(getattr(array, "is_ready", lambda: True)() for array in g.values()):
            return False
        on_host = {path: np.asarray(array) for path, array in g.items()}
        with self._lock:
            if self._entry is entry:
                self._entry = references, on_host
        return True


class Scaling(NamedTuple):
    """What an adapter multiplies the results at one path by, and its ranks.

    g = numerator / norm where `is_dora`, and elsewhere g = numerator.

    Attributes:
      numerator: f32[*stack, out], or f64 in an fp64 model: the magnitude of a DoRA adapter; else g,
        which is 1 for LoRA.
      is_dora: bool[*stack], whether the norm has to be computed.
      scale: f32[*stack], or f64 in an fp64 model: alpha / rank, or alpha / sqrt(rank).
      rank: i32[*stack]; 0 for layers without an adapter.
    """

    numerator: Any
    is_dora: Any
    scale: Any
    rank: Any


def read_adapter(
    model: nnx.Module, projections: Sequence[AdaptableWeight], adapter: Adapter
) -> HostAdapter:
    """Converts an `Adapter` of the model; raises the same errors as `AdapterBank.load`."""
    rules = rules_by_path(adapter)
    by_path = {path: projection for projection in projections for path in projection.module_paths}
    for path in adapter.arrays:
        if path not in by_path:
            raise _unknown_projection(model, projections, path)
    layers: dict[str, dict[Any, LayerAdapter]] = {}
    axes = {weight.path: stack_axes_of(weight.axes) for weight in adapter.weights}
    for path, arrays in adapter.arrays.items():
        projection, rule = by_path[path], rules[path]
        contraction, stack = projection.contraction(rule.rank), projection.stack
        given = Stack(stack.shape, axes.get(path, stack.axes))
        found, expected = (one.stack_part(range(len(projection.shape))) for one in (given, stack))
        if found != expected:
            raise ValueError(
                f"adapter has layers at {path!r} that are stacked along axis "
                f"{' and '.join(map(str, found))} of the kernel; expected axis "
                f"{' and '.join(map(str, expected))}, as in the bank: set the axis in the "
                "kernel's metadata, as param_scan_axis, before the bank is made"
            )
        host = {name: np.asarray(value) for name, value in arrays.items()}
        for name, value in host.items():
            expected = stack.combine(stack.shape, getattr(contraction, name).stored)
            if value.shape != expected:
                raise ValueError(
                    f"adapter has {name} {value.shape} for {path!r}; expected {expected}, for rank "
                    f"{rule.rank}"
                )
        by_index = layers.setdefault(projection.path, {})
        for index in stack.indices():
            lora_a, lora_b, magnitude = (
                getattr(contraction, name).to_matrices(host[name][stack.at(index)])[0]
                for name in ("lora_a", "lora_b", "magnitude")
            )
            by_index[index] = LayerAdapter(lora_a.T, lora_b, magnitude.reshape(-1), rule.scale)
    return _pack(projections, layers)


def read_folder(
    model: nnx.Module,
    projections: Sequence[AdaptableWeight],
    folder: str | os.PathLike[str],
    adapter: str | None = None,
    names: Names | None = None,
) -> HostAdapter:
    """Reads the adapter of a PEFT folder; raises the same errors as `AdapterBank.load`."""
    by_path = {projection.path: projection for projection in projections}
    named = named_model(model, names or Names())
    with open_folder(folder, "np", adapter) as source:
        destinations = source.bank_destinations(named.architecture())
        layers: dict[str, dict[Any, LayerAdapter]] = {}
        for name, found in destinations.adapters.items():
            where = named.layers.get(name)
            if where is None:
                path = named.tied_heads[f"{name}.weight"]
                raise _unknown_projection(model, projections, path, "it is tied to the embedding")
            if where.path not in by_path:
                raise _unknown_projection(model, projections, where.path)
            read = {key: source.read(name) for key, name in found.keys.items()}
            layers.setdefault(where.path, {})[where.index] = LayerAdapter(
                read["lora_a"],
                read["lora_b"].T,
                read["magnitude"].reshape(-1) if "magnitude" in read else None,
                adapter_scale(found.rank, found.alpha, source.config.use_rslora),
            )
    return _pack(projections, layers)


def _unknown_projection(
    model: nnx.Module,
    projections: Sequence[AdaptableWeight],
    path: str,
    reason: str = "the model has no layer of that path",
) -> ValueError:
    reasons = {name: rejection_reason(one) for one in find_weights(model) for name in one.paths}
    if path in reasons:
        reason = reasons[path] or "the bank was made without it: include it in the bank's path="
    return ValueError(
        f"adapter has a layer {path!r}, which the bank has no room for: {reason}; expected some of:"
        f"{listing(projection.path for projection in projections)}"
    )


def _pack(
    projections: Sequence[AdaptableWeight], layers: Mapping[str, Mapping[Any, LayerAdapter]]
) -> HostAdapter:
    """Returns a `HostAdapter` made of the adapters at each path, by their index in its stack."""
    rank = max(layer.lora_a.shape[0] for found in layers.values() for layer in found.values())
    blocks: list[dict[str, np.ndarray]] = [{} for _ in range(0, rank, RANKS)]
    scalings = {}
    for projection in projections:
        found = layers.get(projection.path, {})
        scalings[projection.path] = _scaling_of(projection, found)
        for number, block in enumerate(blocks):
            start = number * RANKS
            if any(layer.lora_a.shape[0] > start for layer in found.values()):
                block[projection.path] = _rank_block(projection, found, start)
    return HostAdapter(tuple(blocks), scalings, rank)


def block_shape(projection: AdaptableWeight) -> tuple[int, ...]:
    """Returns the shape of the array of a projection in a block of ranks."""
    return (*projection.stack.shape, RANKS, sum(projection.sizes))


def _rank_block(
    projection: AdaptableWeight, found: Mapping[Any, LayerAdapter], start: int
) -> np.ndarray:
    block = np.zeros(block_shape(projection), projection.result_dtype)
    lora_a, lora_b = np.split(block, [projection.sizes[0]], axis=-1)
    for index, layer in found.items():
        for name, target, source in (("a", lora_a, layer.lora_a), ("b", lora_b, layer.lora_b)):
            part = source[start : start + RANKS]
            target[index][: len(part)] = part
            _check_finite(f"lora_{name}", projection, target[index])
    return block


def _scaling_of(projection: AdaptableWeight, found: Mapping[Any, LayerAdapter]) -> Scaling:
    (_, out), wide, stack = (
        projection.sizes,
        accumulation_dtype(projection.result_dtype),
        projection.stack.shape,
    )
    scaling = Scaling(
        np.ones((*stack, out), wide),
        np.zeros(stack, bool),
        np.zeros(stack, wide),
        np.zeros(stack, np.int32),
    )
    for index, layer in found.items():
        scaling.scale[index], scaling.rank[index] = layer.scale, layer.lora_a.shape[0]
        if layer.magnitude is not None:
            scaling.numerator[index], scaling.is_dora[index] = layer.magnitude, True
            _check_finite("magnitude", projection, scaling.numerator[index])
    return scaling


def _check_finite(name: str, projection: AdaptableWeight, array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        raise ValueError(
            f"adapter has NaN or infinity in {name} of {projection.path!r}, in the bank's dtype "
            f"{array.dtype}; expected finite numbers: use an earlier checkpoint of its training"
        )
