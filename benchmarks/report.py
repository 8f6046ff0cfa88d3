"""Reports the results of operators, layers and models: what follows from them, and a table of them.

A row is one variant of one piece of work:

    group, shape, framework, variant   the work, and who does it
    bytes, flops                       the least that the work must move, and multiply
    baseline                           the baseline that this is, or is one candidate for
    device, wall                       microseconds by either clock: median, p10, p90, samples
    temp_bytes, peak_bytes             memory beyond arguments and results, and all memory: by XLA's
                                       account in JAX, the allocator's peak in torch
    check                              the verdict of `benchmarks.check`
    refused, failed                    why it could not run here; what went wrong

The header has the card's `ceilings` in the same run: bytes per second of a copy, read plus written,
and bf16 operations per second of a large matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from benchmarks import results
from benchmarks.results import Row
from benchmarks.work import shape_name
from parity.report import table


def label(row: Row) -> str:
    """Returns the name of who did the work, such as `jax mosaic`."""
    return f"{row['framework']} {row['variant']}"


def name(row: Row) -> str:
    """Returns the name of the work, such as `compose 4096×8192`."""
    return f"{row['group']} {shape_name(row['shape'])}"


def correct(row: Row) -> bool:
    """Returns whether the result was checked and is right."""
    return "check" in row and not results.failed(row)


def time(row: Row, clock: str = "device") -> float | None:
    """Returns the median by "device" or "wall", or None where there is none to be trusted."""
    return row[clock]["median"] if row.get(clock) and correct(row) else None


class Report(NamedTuple):
    """The header and the rows of a level's results."""

    header: Row
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(*results.read(path))

    def floor_us(self, row: Row) -> float | None:
        """Returns the time that no version runs much below: of the bytes, or of the products. None
        where a row has none, or nothing was measured of the card."""
        ceilings = self.header.get("ceilings")
        if not ceilings or not row["bytes"]:
            return None
        return 1e6 * max(row["bytes"] / ceilings["copy"], row["flops"] / ceilings["matmul"])

    def ratio(self, row: Row, clock: str = "device", baseline: str = "") -> float | None:
        """Returns the row's time over that of its work's baseline, the fastest where several bear
        the name; None where either's check is red, or nothing is named `baseline`."""
        same = [one for one in self.rows if name(one) == name(row) and "refused" not in one]
        named = [one for one in same if "baseline" in one]
        if named and not baseline:
            baseline = named[0]["baseline"]
        others = [one for one in named if one["baseline"] == baseline]
        mine, theirs = time(row, clock), [time(one, clock) for one in others]
        if mine is None or row in others or not all(map(correct, others)):
            return None
        times = [one for one in theirs if one is not None]
        return mine / min(times) if times else None

    def text(self) -> str:
        """Returns a table of all that ran, and the ceilings; no time of what is not correct."""
        clock = "device" if self.header["environment"]["device"] == "cuda" else "wall"
        header = ("work", "implementation", f"{clock} µs", "of baseline", "of the floor", "GiB")
        ran = (row for row in self.rows if "refused" not in row)
        shown = table(header, ([*self._cells(row, clock)] for row in ran))
        if ceilings := self.header.get("ceilings"):
            shown += (
                f"\n\nceilings of this run: copy {ceilings['copy'] * 1e-12:.3f} TB/s, bf16 product "
                f"{ceilings['matmul'] * 1e-12:.0f} TFLOP/s"
            )
        return shown

    def _cells(self, row: Row, clock: str) -> Iterator[str]:
        us, ratio, floor = time(row, clock), self.ratio(row, clock), self.floor_us(row)
        yield from (name(row), label(row), f"{us:.1f}" if us else "RED")
        yield f"{ratio:.2f}" if ratio else ""
        yield f"{floor / us:.0%}" if floor and us else ""
        yield f"{row['peak_bytes'] / 2**30:.1f}" if row.get("peak_bytes") else ""
