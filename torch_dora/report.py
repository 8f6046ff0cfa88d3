"""What merging changed, layer by layer."""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class MergedLayer:
    """What merging did to one layer; all norms are Frobenius'.

    Attributes:
        path: the layer's name, as in ``named_modules``; the first of them where it is shared.
        dtype: of its weight.
        change: ‖merged - weight‖ / ‖weight‖, before rounding: how much the adapter does.
        rounding: ‖rounded - merged‖ / ‖merged‖: what the cast to ``dtype`` costs.
        lost: ‖rounded - merged‖ / ‖merged - weight‖: that cost as a part of the adapter's work; at
            1 the rounding is as large as all that training changed.
        max_abs: the largest difference that the cast makes to an element.
    """

    path: str
    dtype: str
    change: float
    rounding: float
    lost: float
    max_abs: float


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """The rounding that merging caused, layer by layer; ``print`` shows a table."""

    layers: tuple[MergedLayer, ...]

    def __str__(self) -> str:
        width = max([len("layer"), *(len(layer.path) for layer in self.layers)])
        lines = [f"{'layer':{width}}  dtype     change    rounding  lost      max abs"]
        for layer in self.layers:
            numbers = (layer.change, layer.rounding, layer.lost, layer.max_abs)
            columns = "  ".join(f"{number:<8.2e}" for number in numbers)
            lines.append(f"{layer.path:{width}}  {layer.dtype:8}  {columns}")
        return "\n".join(lines)


@torch.no_grad()
def reported(path: str, weight: Tensor, merged: Tensor, rounded: Tensor) -> MergedLayer:
    """The row of a layer, of its weight, the merged one in fp32 (fp64) and that as it was cast."""
    change, error = merged - weight, rounded - merged
    start, size, moved, off = (float(x.norm()) for x in (weight.to(merged), merged, change, error))
    return MergedLayer(
        path=path,
        dtype=str(weight.dtype).removeprefix("torch."),
        change=moved / start if start else float("inf"),
        rounding=off / size if size else 0.0,
        lost=off / moved if moved else 0.0,
        max_abs=float(error.abs().max()),
    )
