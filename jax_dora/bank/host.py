"""An adapter in host memory, read, checked and laid out as a bank takes it."""

import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from dora_common.hyperparameters import adapter_scale
from dora_common.peft.folder import opened
from dora_common.rules import listing
from jax_dora.adapt.adapter import Adapter, rules_by_path
from jax_dora.adapt.find_sites import find_sites
from jax_dora.bank.projections import BankProjection, why_not
from jax_dora.ops.compose import accumulator
from jax_dora.peft.names import Names
from jax_dora.peft.torch_view import torch_view

# Ranks that are written at once: an adapter travels in pieces of this, whatever its rank, so that
# one compiled program writes adapters of all ranks.
RANKS = 8


@dataclasses.dataclass(frozen=True)
class Layer:
    """The adapter of one layer.

    Attributes:
      lora_a: [rank, in].
      lora_b: [rank, out].
      magnitude: [out]; None for LoRA.
      scale: alpha / rank, or alpha / sqrt(rank).
    """

    lora_a: np.ndarray
    lora_b: np.ndarray
    magnitude: np.ndarray | None
    scale: float


@dataclasses.dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory, which `AdapterBank.load` takes at once; `AdapterBank.read` makes
    it.

    Attributes:
      pieces: by path, lora_a and lora_b side by side, [*stack, RANKS, in + out], of ranks 0 to 7,
        8 to 15 and so on; without the paths that have no such ranks.
      facts: by path, for every path of the bank.
      rank: the largest.
      cached_g: the g that the last load has found.
    """

    pieces: tuple[Mapping[str, np.ndarray], ...]
    facts: Mapping[str, "Facts"]
    rank: int
    cached_g: "CachedG" = dataclasses.field(default_factory=lambda: CachedG(), compare=False)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of its matrices."""
        return sum(array.nbytes for piece in self.pieces for array in piece.values())

    def facts_beside(self, kernels: Any) -> dict[str, "Facts"]:
        """Returns the facts for a load beside these kernels: where g is known, as numbers that no
        norm has to be taken for."""
        g = self.cached_g.beside(kernels)
        if g is None:
            return dict(self.facts)
        return {
            path: Facts(g[path], np.zeros_like(one.is_dora), one.scale, one.rank)
            for path, one in self.facts.items()
        }


class CachedG:
    """The g of an adapter beside the kernels that it was last loaded beside, in host memory: with
    it the adapter is loaded again without a norm."""

    def __init__(self) -> None:
        self._kernels: list[weakref.ref[Any]] = []
        self._g: Mapping[str, Any] = {}

    def beside(self, kernels: Any) -> Mapping[str, np.ndarray] | None:
        """Returns g by path, or None where it is not known beside these very arrays."""
        known, arrays = [one() for one in self._kernels], jax.tree.leaves(kernels)
        if len(known) != len(arrays) or any(a is not b for a, b in zip(known, arrays, strict=True)):
            return None
        return {path: np.asarray(g) for path, g in self._g.items()}

    def keep(self, kernels: Any, g: Mapping[str, jax.Array]) -> None:
        """Keeps g, which is on its way to the host."""
        for one in g.values():
            one.copy_to_host_async()
        self._g = g
        self._kernels = [weakref.ref(array) for array in jax.tree.leaves(kernels)]

    def has_arrived(self) -> bool:
        """Returns whether g is in host memory; if so, it is nowhere else."""
        if not all(getattr(one, "is_ready", lambda: True)() for one in self._g.values()):
            return False
        self._g = {path: np.asarray(one) for path, one in self._g.items()}
        return True


class Facts(NamedTuple):
    """The numbers of a path's adapters that are no matrices.

    Attributes:
      magnitude: f32[*stack, out], f64 in a model of fp64; what results are multiplied by, such as
        1 for LoRA, where it is not DoRA's.
      is_dora: bool[*stack].
      scale: likewise, [*stack].
      rank: i32[*stack]; 0 without an adapter.
    """

    magnitude: Any
    is_dora: Any
    scale: Any
    rank: Any


def read_adapter(
    model: nnx.Module, projections: Sequence[BankProjection], adapter: Adapter
) -> HostAdapter:
    """Returns an `Adapter` of the model as a bank takes it; raises as `AdapterBank.load`."""
    rules = rules_by_path(adapter)
    by_path = {path: projection for projection in projections for path in projection.paths}
    for path in [*(one.path for one in adapter.weights), *adapter.arrays]:
        if path not in by_path:
            raise _unknown_projection(model, projections, path)
    layers: dict[str, dict[Any, Layer]] = {}
    stack_axes = dict(adapter.stack_axes)
    for path, arrays in adapter.arrays.items():
        projection, rule = by_path[path], rules[path]
        layout, stack = projection.layout(rule.rank), projection.stack
        axis = stack.axis % len(projection.shape)
        if stack.shape and (given := stack_axes.get(path, axis)) != axis:
            raise ValueError(
                f"adapter is of layers at {path!r} that are stacked along axis {given} of the "
                f"kernel; expected axis {axis}, which the bank takes: give the kernel's axis in "
                "its metadata, as param_scan_axis, before the bank is made"
            )
        host = {name: np.asarray(value) for name, value in arrays.items()}
        for name, value in host.items():
            wanted = stack.combine(stack.shape, getattr(layout, name).stored)
            if value.shape != wanted:
                raise ValueError(
                    f"adapter has {name} {value.shape} for {path!r}; expected {wanted}, of rank "
                    f"{rule.rank}"
                )
        one = layers.setdefault(projection.path, {})
        for index in stack.indices():
            lora_a, lora_b, magnitude = (
                getattr(layout, name).to_matrices(host[name][stack.at(index)])[0]
                for name in ("lora_a", "lora_b", "magnitude")
            )
            one[index] = Layer(lora_a.T, lora_b, magnitude.reshape(-1), rule.scale)
    return _packed(projections, layers)


def read_folder(
    model: nnx.Module,
    projections: Sequence[BankProjection],
    folder: str | os.PathLike[str],
    adapter: str | None = None,
    names: Names | None = None,
) -> HostAdapter:
    """Returns the adapter of a PEFT folder as a bank takes it; raises as `AdapterBank.load`."""
    by_path = {projection.path: projection for projection in projections}
    view = torch_view(model, names or Names())
    with opened(folder, "np", adapter) as source:
        fit = source.fit_to_bank(view.outline())
        layers: dict[str, dict[Any, Layer]] = {}
        for name, one in fit.adapters.items():
            where = view.layers[name]
            if where.path not in by_path:
                raise _unknown_projection(model, projections, where.path)
            read = {key: source.read(name) for key, name in one.keys.items()}
            layers.setdefault(where.path, {})[where.index] = Layer(
                read["lora_a"],
                read["lora_b"].T,
                read["magnitude"].reshape(-1) if "magnitude" in read else None,
                adapter_scale(one.rank, one.alpha, source.config.use_rslora),
            )
    return _packed(projections, layers)


def _unknown_projection(
    model: nnx.Module, projections: Sequence[BankProjection], path: str
) -> ValueError:
    there = {name: why_not(site) for site in find_sites(model) for name in site.names}
    reason = "the model has none of that path"
    if path in there:
        reason = there[path] or "the bank was made without it: say so in its path="
    return ValueError(
        f"adapter has a layer {path!r}, which the bank has no room for: {reason}; expected some of:"
        f"{listing(projection.path for projection in projections)}"
    )


def _packed(
    projections: Sequence[BankProjection], layers: Mapping[str, Mapping[Any, Layer]]
) -> HostAdapter:
    """Returns the layers of each path, by their index in its stack, in pieces."""
    rank = max(one.lora_a.shape[0] for found in layers.values() for one in found.values())
    pieces: list[dict[str, np.ndarray]] = [{} for _ in range(0, rank, RANKS)]
    facts = {}
    for projection in projections:
        found = layers.get(projection.path, {})
        facts[projection.path] = _facts(projection, found)
        for number, piece in enumerate(pieces):
            start = number * RANKS
            if any(one.lora_a.shape[0] > start for one in found.values()):
                piece[projection.path] = _piece(projection, found, start)
    return HostAdapter(tuple(pieces), facts, rank)


def piece_shape(projection: BankProjection) -> tuple[int, ...]:
    """Returns the shape of a projection's part of a piece."""
    return (*projection.stack.shape, RANKS, sum(projection.sizes))


def _piece(projection: BankProjection, found: Mapping[Any, Layer], start: int) -> np.ndarray:
    piece = np.zeros(piece_shape(projection), projection.dtype)
    lora_a, lora_b = np.split(piece, [projection.sizes[0]], axis=-1)
    for index, one in found.items():
        for name, target, source in (("a", lora_a, one.lora_a), ("b", lora_b, one.lora_b)):
            part = source[start : start + RANKS]
            target[index][: len(part)] = part
            _check_finite(f"lora_{name}", projection, target[index])
    return piece


def _facts(projection: BankProjection, found: Mapping[Any, Layer]) -> Facts:
    (_, out), wide, stack = projection.sizes, accumulator(projection.dtype), projection.stack.shape
    facts = Facts(
        np.ones((*stack, out), wide),
        np.zeros(stack, bool),
        np.zeros(stack, wide),
        np.zeros(stack, np.int32),
    )
    for index, one in found.items():
        facts.scale[index], facts.rank[index] = one.scale, one.lora_a.shape[0]
        if one.magnitude is not None:
            facts.magnitude[index], facts.is_dora[index] = one.magnitude, True
            _check_finite("magnitude", projection, facts.magnitude[index])
    return facts


def _check_finite(name: str, projection: BankProjection, array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        raise ValueError(
            f"adapter has NaN or infinity in {name} of {projection.path!r}, in the bank's dtype "
            f"{array.dtype}; expected finite numbers: take an earlier state of its training"
        )
