"""What was measured, on what."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax", "jaxlib", "flax", "torch", "triton", "peft", "transformers", "numpy")
CARD_QUERY = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")


def describe(device: str, commit: str | None = None, root: Path = ROOT) -> dict[str, str]:
    """Returns commit, versions and card; `commit` overrides what git says of `root`."""
    return {
        "commit": commit or _commit(root),
        "device": device,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        **(_card() if device == "cuda" else {"card": f"CPU ({platform.machine()})"}),
    }


def _card() -> dict[str, str]:
    answer = _output("nvidia-smi", f"--query-gpu={','.join(CARD_QUERY)}", "--format=csv,noheader")
    values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer else []
    if len(values) != len(CARD_QUERY):
        return {"card": "unknown"}
    named = dict(zip(CARD_QUERY, values, strict=True))
    return {"card": named.pop("name"), **named}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit(root: Path) -> str:
    git = ("git", "-C", str(root))
    commit = _output(*git, "rev-parse", "HEAD")
    if not commit:
        return "unknown"
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return commit + (" with changes" if changed else "")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
