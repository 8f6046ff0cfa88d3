"""Reports how much merging an adapter changed the weights, layer by layer."""

import dataclasses
from typing import Self


@dataclasses.dataclass(frozen=True)
class MergedLayer:
    """How much merging changed one layer. All norms are Frobenius norms.

    Attributes:
        path: the layer's path; the first path if the layer is shared.
        dtype: the dtype of the layer's weight.
        change: ‖merged - weight‖ / ‖weight‖ before rounding, the relative effect of the adapter.
        rounding: ‖rounded - merged‖ / ‖merged‖, the relative error of the cast to ``dtype``.
        lost: ‖rounded - merged‖ / ‖merged - weight‖, the rounding error relative to the adapter's
            effect. At 1 the rounding error is as large as everything that training changed.
        max_abs: the largest absolute rounding error of an element.
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
        """Returns the report of one layer, from the norms of the weight, the merged weight before
        rounding, their difference, and the rounding error."""
        return cls(
            path=path,
            dtype=dtype,
            change=change / weight if weight else (float("inf") if change else 0.0),
            rounding=error / merged if merged else 0.0,
            lost=error / change if change else 0.0,
            max_abs=max_abs,
        )


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """The effect and the rounding error of merging, layer by layer. ``print`` shows a table."""

    layers: tuple[MergedLayer, ...]

    def __str__(self) -> str:
        width = max([len("layer"), *(len(layer.path) for layer in self.layers)])
        lines = [f"{'layer':{width}}  dtype     change    rounding  lost      max abs"]
        for layer in self.layers:
            numbers = (layer.change, layer.rounding, layer.lost, layer.max_abs)
            columns = "  ".join(f"{number:<8.2e}" for number in numbers)
            lines.append(f"{layer.path:{width}}  {layer.dtype:8}  {columns}")
        return "\n".join(lines)
