"""A server of a model and its adapters, with OpenAI's HTTP interface; `jax-dora serve` runs it."""

from importlib.util import find_spec as _find_spec

if any(_find_spec(name) is None for name in ("prometheus_client", "starlette", "uvicorn")):
    raise ImportError("a package of the extra is missing; expected: pip install 'jax-dora[serve]'")

from jax_dora.serve.server import Server as Server
from jax_dora.serve.server import Settings as Settings
