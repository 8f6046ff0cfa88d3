"""Reports how far the best plain LoRA is from what a DoRA adapter does, layer by layer."""

import dataclasses
import math
import numbers
from typing import Any, Self

import numpy as np

from dora_common.hyperparameters import check_rank
from dora_common.rules import listing


@dataclasses.dataclass(frozen=True)
class LoRALayer:
    """How far the best LoRA of one layer is from its DoRA adapter.

    Attributes:
        path: the layer's path; the first path if the layer is shared.
        error: ‖(W' - W) - s·BA‖ / ‖W' - W‖ in Frobenius norms. Of a layer with several matrices,
            such as packed experts or stacked layers, the largest of the matrices' errors.
        needed: the least rank whose error is within the limit.
    """

    path: str
    error: float
    needed: int

    @classmethod
    def from_singular_values(
        cls, path: str, values: Any, rank: int, *, limit: float, groups: int = 1
    ) -> Self:
        """Returns the report of one layer.

        Args:
            values: the singular values of W' - W, the largest first: [matrices, all of one].
            rank: the LoRA's rank.
            groups: the groups of a convolution, which share the rank equally.
        """
        squares = np.square(np.asarray(values, np.float64))
        # The error of each rank from 0 on, since the best LoRA drops the smallest singular values.
        left = np.cumsum(np.pad(squares, ((0, 0), (0, 1)))[:, ::-1], axis=1)[:, ::-1]
        total = left[:, :1]
        errors = np.sqrt(left / np.where(total == 0, 1, total)).max(axis=0)
        within = int(np.argmax(errors <= limit))
        return cls(
            path, float(errors[min(rank // groups, len(errors) - 1)]), groups * max(1, within)
        )


@dataclasses.dataclass(frozen=True)
class LoRAReport:
    """The error of a plain LoRA in place of a DoRA adapter, layer by layer. ``print`` shows a
    table.

    Attributes:
        rank: the LoRA's rank.
        limit: the largest error that was allowed.
    """

    rank: int
    limit: float
    layers: tuple[LoRALayer, ...]

    def __str__(self) -> str:
        width = max([len("layer"), *(len(layer.path) for layer in self.layers)])
        lines = [f"{'layer':{width}}  error     rank for an error of {self.limit:.2g}"]
        lines += [f"{one.path:{width}}  {one.error:<8.2e}  {one.needed}" for one in self.layers]
        return "\n".join(lines)

    def check(self) -> None:
        """Raises ValueError that lists the layers whose error is above the limit."""
        if missed := [one for one in self.layers if one.error > self.limit]:
            raise ValueError(
                f"rank is {self.rank} and limit is {self.limit:.3g}, but the best LoRA of that "
                "rank differs by more from what these layers' adapters do; expected a rank of at "
                f"least {max(one.needed for one in missed)}, or a larger limit:"
                + listing(
                    f"{one.path}: error {one.error:.3g}, rank {one.needed} would do"
                    for one in missed
                )
            )


def check_arguments(rank: Any, limit: Any) -> None:
    """Raises TypeError or ValueError unless ``rank`` is an integer of at least 1 and ``limit`` a
    relative error."""
    check_rank(rank)
    expected = "the largest relative error of a layer to accept, such as 0.05"
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real):
        raise TypeError(f"limit is {limit!r}, a {type(limit).__name__}; expected {expected}")
    if not 0 <= float(limit) < math.inf:
        raise ValueError(f"limit is {limit}; expected {expected}")
