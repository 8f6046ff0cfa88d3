"""A server of a model and its adapters, with OpenAI's HTTP interface; `jax-dora serve` runs it."""

from jax_dora.serve.server import Server as Server
from jax_dora.serve.server import Settings as Settings
