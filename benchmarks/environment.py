"""What was measured, on what."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "torch", "triton", "peft", "transformers", "numpy")
CARD_QUERY = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")


def environment(device: str, commit: str | None) -> dict[str, str]:
    """Commit, versions and card; `commit` overrides what git says here."""
    return {
        "commit": commit or _commit(),
        "device": device,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        **(card() if device == "cuda" else {"card": f"CPU ({platform.machine()})"}),
    }


def card() -> dict[str, str]:
    """The card as nvidia-smi sees it now, clocks included."""
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


def _commit() -> str:
    commit = _output("git", "rev-parse", "HEAD")
    if not commit:
        return "unknown"
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return commit + (" with changes" if changed else "")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
