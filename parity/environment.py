"""The environment of a report (commit, versions, GPU), and the choice of a device for both
frameworks."""

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax", "jaxlib", "flax", "torch", "triton", "numpy")
CARD_QUERY = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")


def environment(
    device: str, commit: str | None = None, others: Sequence[str] = (), root: Path = ROOT
) -> dict[str, str]:
    """Returns the commit, versions and GPU.

    Args:
      device: "cpu" or "cuda".
      commit: overrides the commit from git.
      others: packages to list in addition to those of every report.
      root: a checkout.
    """
    return {
        "commit": commit or _commit(root),
        "device": device,
        "kernels": "native" if device == "cuda" else "interpreted",
        "python": platform.python_version(),
        **{name: _version(name) for name in (*PACKAGES, *others)},
        **(card() if device == "cuda" else {"card": f"CPU ({platform.machine()})"}),
    }


def card() -> dict[str, str]:
    """Returns what nvidia-smi reports about the GPU now, including clocks."""
    answer = _output("nvidia-smi", f"--query-gpu={','.join(CARD_QUERY)}", "--format=csv,noheader")
    values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer else []
    if len(values) != len(CARD_QUERY):
        return {"card": "unknown"}
    named = dict(zip(CARD_QUERY, values, strict=True))
    return {"card": named.pop("name"), **named}


def choose_device(device: str) -> str:
    """Sets up both frameworks for "auto", "cpu" or "cuda" and returns the device, "cpu" or "cuda".

    Must be called before either kernel package is imported.

    Raises:
      SystemExit: the device is "cuda" and a framework sees no GPU.
    """
    import jax
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        # The size of XLA's thread pool. Callbacks of interpreted kernels wait for each other in
        # this pool, so with as few threads as a small machine has cores they deadlock.
        os.environ.setdefault("NPROC", "16")
        jax.config.update("jax_platforms", "cpu")
        return "cpu"
    # Both frameworks share the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    start_jax()
    for framework, sees, install in (
        ("torch", torch.cuda.is_available(), "install a CUDA build of torch"),
        ("jax", jax.default_backend() == "gpu", "pip install 'jax-dora[cuda13]'"),
    ):
        if not sees:
            sys.exit(f"--device cuda: {framework} sees no GPU; {install}, or use --device cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    return "cuda"


@functools.cache
def start_jax() -> None:
    """Starts JAX without a change of CUDA's current device.

    JAX makes the last GPU the current one when it starts, but torch draws on the current one and
    exports no tensors of others.
    """
    import jax
    import torch

    if torch.cuda.is_available():
        current = torch.cuda.current_device()
        jax.devices()
        torch.cuda.set_device(current)


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
