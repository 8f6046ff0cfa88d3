"""A table of a model's weights, which tells what is adapted and what can be adapted."""

import dataclasses
import math
from typing import Protocol


class CoveredWeight(Protocol):
    """One weight of a model, as each package describes it.

    Attributes:
      path: the weight's path, as rules match it.
      shape: the weight's shape.
      status: "adapted", "adaptable" or "not adaptable".
      how: what adapts the weight, with its axes, or why nothing can adapt it. For a quantised
        weight also the format.
      is_linear: whether "all-linear" selects the weight.
      merged_bytes: the size, in fp32, of the arrays W' that a call computes for operations that are
        neither products nor lookups; 0 if that is not known.
    """

    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def status(self) -> str: ...
    @property
    def how(self) -> str: ...
    @property
    def is_linear(self) -> bool: ...
    @property
    def merged_bytes(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Coverage:
    """A table of a model's weights of two axes or more, one row each; `str()` formats it."""

    weights: tuple[CoveredWeight, ...]

    def count(self, *statuses: str) -> int:
        """Returns how many weights have one of these statuses."""
        return sum(weight.status in statuses for weight in self.weights)

    def share(self, *statuses: str) -> float:
        """Returns the share of all elements, 0 to 1, that belong to weights with one of these
        statuses."""
        total = sum(math.prod(weight.shape) for weight in self.weights)
        part = sum(math.prod(one.shape) for one in self.weights if one.status in statuses)
        return part / total if total else 0.0

    def summary(self) -> str:
        """Returns counts and shares by status in one line."""
        parts = [
            f"{self.count(status)} {status} ({self.share(status):.1%} of the elements)"
            for status in ("adapted", "adaptable", "not adaptable")
        ]
        return f"{len(self.weights)} weights: {', '.join(parts)}"

    def __str__(self) -> str:
        total = sum(math.prod(weight.shape) for weight in self.weights) or 1
        rows = [("path", "shape", "elements", "share", "status", "how")]
        for weight in self.weights:
            shape = "×".join(map(str, weight.shape))
            how = weight.how
            if weight.merged_bytes:
                how += f"; W' as an array, {_size(weight.merged_bytes)}"
            elements = math.prod(weight.shape)
            share = f"{elements / total:.1%}"
            rows.append((weight.path, shape, f"{elements:,}", share, weight.status, how))
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = [
            "  ".join(
                cell.rjust(width) if column in (2, 3) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, self.summary()])


def _size(count: int) -> str:
    units = ("B", "KiB", "MiB", "GiB")
    power = min((count.bit_length() - 1) // 10, len(units) - 1)
    return f"{count / 1024**power:.4g} {units[power]}"
