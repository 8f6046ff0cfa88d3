"""Boxes of sizes within which one choice was measured to be the better one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_dora.ops.tuning import Bounds

# A launch's fixed cost weighs less in a larger one, and an adapter of a lower rank is less to do.
# Beyond all that was measured a choice is carried on in these directions, and in no other.
CARRIED_UP = frozenset({"rows", "in", "out", "elements", "lane"})
CARRIED_DOWN = frozenset({"rank", "itemsize"})


@dataclass(frozen=True)
class Point:
    """A measured shape.

    Attributes:
      sizes: as in `jax_dora.ops.tuning.KERNELS`.
      saved: microseconds that the choice saves there.
      lost: the choice is the worse one there, by more than measurements scatter.
    """

    sizes: Mapping[str, int]
    saved: float
    lost: bool


def best(points: Sequence[Point]) -> Bounds | None:
    """The box without a lost point that saves most, or None where nothing is to be saved."""
    kept = _kept(points)
    if sum(point.saved for point in kept) <= 0:
        return None
    excluded = [point for point in points if not any(point is one for one in kept)]
    # A product last in, first out: a bound on it says less than those on its factors.
    names = sorted(points[0].sizes, key=lambda name: name != "elements")
    values = {name: [point.sizes[name] for point in kept] for name in names}
    low = {name: min(sizes) for name, sizes in values.items()}
    high = {name: max(sizes) for name, sizes in values.items()}
    for name in names:
        _move(name, low, high, excluded, upper=False)
        _move(name, low, high, excluded, upper=True)
    # Implied by its factors' bounds.
    if "elements" in low and low["elements"] <= low.get("rows", 1) * low.get("out", 1):
        del low["elements"]
    low, high = (
        {name: bounds[name] for name in points[0].sizes if name in bounds} for bounds in (low, high)
    )
    return Bounds(low, high)


def _kept(points: Sequence[Point]) -> list[Point]:
    """The points of the best box. Sets of points are bits of an integer."""
    boxes = {(1 << len(points)) - 1}
    for name in points[0].sizes if points else ():
        values = sorted({point.sizes[name] for point in points})
        ranges = {
            sum(1 << i for i, point in enumerate(points) if low <= point.sizes[name] <= high)
            for low in values
            for high in values
        }
        boxes = {box & one for box in boxes for one in ranges}
    lost = sum(1 << i for i, point in enumerate(points) if point.lost)

    def inside(box: int) -> list[Point]:
        return [point for i, point in enumerate(points) if box >> i & 1]

    winning = (box for box in boxes if not box & lost)

    def merit(box: int) -> tuple[float, int, int]:
        return sum(point.saved for point in inside(box)), box.bit_count(), box

    return inside(max(winning, key=merit, default=0))


def _move(
    name: str, low: dict[str, int], high: dict[str, int], excluded: Sequence[Point], upper: bool
) -> None:
    """Moves one bound outwards, as far as measurements speak for it.

    To the geometric middle between the last shape kept and the next one excluded; where none
    follows, away altogether if the choice is carried on in that direction.
    """
    mine, sign = (high, 1) if upper else (low, -1)
    last = mine.pop(name)
    others = Bounds(low, high)
    beyond = [
        point.sizes[name]
        for point in excluded
        if sign * (point.sizes[name] - last) > 0 and others.hold(point.sizes)
    ]
    if beyond:
        middle = math.isqrt(last * (min(beyond) if upper else max(beyond)))
        # Rounded away from what is excluded.
        mine[name] = middle if upper else middle + 1
    elif name not in (CARRIED_UP if upper else CARRIED_DOWN):
        mine[name] = last
