"""Serves a model and its adapters with OpenAI's HTTP interface; used by `jax-dora serve`."""

from importlib.util import find_spec as _find_spec

if any(_find_spec(name) is None for name in ("prometheus_client", "starlette", "uvicorn")):
    raise ImportError(
        "jax_dora.lm.serve needs prometheus_client, starlette and uvicorn; install them with "
        "pip install 'jax-dora[serve]'"
    )

from jax_dora.lm.serve.server import Server as Server
from jax_dora.lm.serve.server import Settings as Settings
