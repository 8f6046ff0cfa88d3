"""What was measured per kind of device: where a kernel wins, and with which configuration.

One JSON file per device kind in `tuning_data/`, named like the kind in lower case with underscores
("NVIDIA H200" is `nvidia_h200.json`). A kind without a file takes the H200's: the crossovers of the
other Hopper cards lie near its own. Nothing is tuned on first call.
"""

import functools
import json
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
