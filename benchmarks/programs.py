"""Compiled programs of JAX's: what is known of them before they are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.results import Row, attempted


class Program(NamedTuple):
    """A compiled program, None where it does not compile, and its row."""

    row: Row
    run: Any

    @property
    def kind(self) -> str:
        return self.row["kind"]


def compiled(row: Row, lower: Callable[[], Any]) -> Program:
    """Returns the program that is lowered so, and the row with what it takes, or why it failed."""
    run = None

    def facts() -> Row:
        nonlocal run
        begin = time.monotonic()
        run = lower().compile()
        seconds, memory = time.monotonic() - begin, run.memory_analysis()
        return {
            "kernels": run.as_text().count('custom_call_target="mosaic_gpu'),
            "temp_bytes": memory.temp_size_in_bytes,
            "peak_bytes": getattr(memory, "peak_memory_in_bytes", None),
            "compile_s": seconds,
        }

    return Program(attempted(row, facts), run)
