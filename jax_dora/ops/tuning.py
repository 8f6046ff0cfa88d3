"""What was measured per kind of device: where a kernel wins, and with which configuration.

One JSON file per device kind in `tuning_data/`, named like the kind in lower case with underscores
("NVIDIA H200" is `nvidia_h200.json`). A kind without a file takes the H200's: the crossovers of the
other Hopper cards lie near its own. Nothing is tuned on first call.

A table names, for each kernel, the sizes at which it was seen to be no slower than XLA:
`{"min": {size: bound}, "max": {size: bound}}`, or null where it never was.
"""

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

FALLBACK = "NVIDIA H200"


@functools.cache
def load(device_kind: str) -> dict[str, Any]:
    """The table of `device_kind`, or the fallback's."""
    folder = resources.files("jax_dora.ops") / "tuning_data"
    for kind in (device_kind, FALLBACK):
        file = folder / f"{kind.lower().replace(' ', '_')}.json"
        if file.is_file():
            return json.loads(file.read_text())
    raise FileNotFoundError(f"the tuning table of {FALLBACK} is missing from the installation")


def slower(device_kind: str, kernel: str, sizes: Mapping[str, int]) -> str | None:
    """Why XLA is the better choice than `kernel` for a call of `sizes`, or None."""
    wins = load(device_kind)[kernel]
    if wins is None:
        return f"XLA was as fast as {kernel} at every size"
    for name, bound in wins.get("min", {}).items():
        if sizes[name] < bound:
            return f"{name} = {sizes[name]} is below {bound}, where {kernel} begins to win"
    for name, bound in wins.get("max", {}).items():
        if sizes[name] > bound:
            return f"{name} = {sizes[name]} is above {bound}, where {kernel} ceases to win"
    return None
