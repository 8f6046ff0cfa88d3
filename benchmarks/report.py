"""Reads the results of the levels ops, layer and tune.

One row is one variant of one piece of work:

    group, shape, framework, variant   the operation, its sizes, and the variant
    bytes, flops                       the least number of bytes to move, and the FLOPs of the
                                       matrix products
    baseline                           the name of the baseline, if this variant is one
    device, wall                       microseconds by either clock: median, p10, p90, samples
    temp_bytes                         memory in addition to arguments and results: planned by XLA
                                       in JAX, the allocator's peak in torch
    check                              the verdict of `benchmarks.work.judge`
    refused, failed                    why the variant does not run on this device, or the error

The header has the card's `ceilings`, measured in the same run: the bytes per second of a copy, read
plus written, and the operations per second of a large bf16 matrix product.
"""

from pathlib import Path
from typing import NamedTuple, Self

from benchmarks import results
from benchmarks.results import Row
from benchmarks.work import shape_name


def label(row: Row) -> str:
    """Returns the framework and the variant, such as `jax mosaic`."""
    return f"{row['framework']} {row['variant']}"


def name(row: Row) -> str:
    """Returns the name of the work, such as `compose 4096×8192`."""
    return f"{row['group']} {shape_name(row['shape'])}"


def correct(row: Row) -> bool:
    """Returns whether the result was checked and is right."""
    return "check" in row and not results.failed(row)


def time(row: Row, clock: str = "device") -> float | None:
    """Returns the median by "device" or "wall"; None if there is none or the result is wrong."""
    return row[clock]["median"] if row.get(clock) and correct(row) else None


class Report(NamedTuple):
    """The header and the rows of a result file."""

    header: Row
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(*results.read(path))

    @classmethod
    def committed(cls, name: str, card: str = "h200") -> Self:
        """Returns the report of a committed result file."""
        return cls.read(results.FOLDER / card / f"{name}.jsonl")

    def floor_us(self, row: Row) -> float | None:
        """Returns the least possible time: that of the bytes at the copy rate, or of the products
        at the matmul rate, whichever is longer; None if bytes or ceilings are not known."""
        ceilings = self.header.get("ceilings")
        if not ceilings or not row["bytes"]:
            return None
        return 1e6 * max(row["bytes"] / ceilings["copy"], row["flops"] / ceilings["matmul"])

    def ratio(self, row: Row, clock: str = "device", baseline: str = "") -> float | None:
        """Returns the row's time divided by the time of the baseline of the same work.

        If several rows are named `baseline`, the fastest counts. Returns None if the row is itself
        a baseline, there is no baseline, or a result of either is wrong.
        """
        same = [other for other in self.rows if name(other) == name(row) and "refused" not in other]
        named = [other for other in same if "baseline" in other]
        if named and not baseline:
            baseline = named[0]["baseline"]
        others = [other for other in named if other["baseline"] == baseline]
        mine, theirs = time(row, clock), [time(other, clock) for other in others]
        if mine is None or row in others or not all(map(correct, others)):
            return None
        return mine / min(times) if (times := [us for us in theirs if us is not None]) else None
