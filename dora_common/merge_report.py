"""Reports what merging an adapter into the weights changed, layer by layer."""

import dataclasses
from typing import Self


@dataclasses.dataclass(frozen=True)
class MergedLayer:
    """The change of one layer by merging; all norms are Frobenius norms.

    Attributes:
        path: the layer's path; the first of them where it is shared.
        dtype: the dtype of its weight.
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

    @classmethod
    def from_norms(
        cls,
        path: str,
        dtype: str,
        *,
        weight: float,
        merged: float,
        change: float,
        error: float,
        max_abs: float,
    ) -> Self:
        """Returns the row of a layer from the norms of its weight, of the merged weight before
        rounding, of their difference, and of the error that rounding makes."""
        return cls(
            path=path,
            dtype=dtype,
            change=change / weight if weight else float("inf"),
            rounding=error / merged if merged else 0.0,
            lost=error / change if change else 0.0,
            max_abs=max_abs,
        )


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
