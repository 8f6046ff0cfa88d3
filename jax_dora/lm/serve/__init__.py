"""Serves a model and its adapters with OpenAI's HTTP interface; used by `jax-dora serve`."""

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from jax_dora.lm.serve.settings import Settings as Settings

if _TYPE_CHECKING:
    from jax_dora.lm.serve.server import Server as Server


def __getattr__(name: str) -> _Any:
    """Imports `Server` when it is used, since it needs packages that `Settings` does not."""
    if name != "Server":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if any(
        _find_spec(package) is None for package in ("prometheus_client", "starlette", "uvicorn")
    ):
        raise ImportError(
            "jax_dora.lm.serve.Server needs prometheus_client, starlette and uvicorn; install them "
            "with pip install 'jax-dora[serve]'"
        )
    from jax_dora.lm.serve.server import Server

    return Server
