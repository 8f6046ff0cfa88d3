"""JAX programs that are compiled before they are timed."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.results import Row, attempt
from jax_dora.ops.triton import kernel_call

TARGETS = ("mosaic_gpu", kernel_call.TARGET)


class Program(NamedTuple):
    """A compiled program, None if compiling failed, and its row."""

    row: Row
    run: Any

    @property
    def kind(self) -> str:
        return self.row["kind"]


def compiled(row: Row, lower: Callable[[], Any]) -> Program:
    """Returns the compiled program, and the row with the number of its kernels, its memory
    and its compile time, or with the reason why it failed."""
    run = None

    def facts() -> Row:
        nonlocal run
        begin = time.monotonic()
        run = lower().compile()
        seconds, memory = time.monotonic() - begin, run.memory_analysis()
        text = run.as_text()
        return {
            "kernels": sum(text.count(f'custom_call_target="{target}') for target in TARGETS),
            "temp_bytes": memory.temp_size_in_bytes,
            "peak_bytes": getattr(memory, "peak_memory_in_bytes", None),
            "compile_s": seconds,
        }

    return Program(attempt(row, facts), run)
