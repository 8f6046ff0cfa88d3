"""Level `training`: the same adapter trained by both frameworks on the same text, step by step.

`python -m parity training` runs thousands of steps for several seeds; `quick_check` is a short run.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if runs came further apart than `parity.tolerances` allows."""
    from parity.training.command import main

    return main(arguments)


def quick_check(device: str = "cpu") -> bool:
    """See `parity.training.quick.quick_check`."""
    from parity.training.quick import quick_check

    return quick_check(device)
