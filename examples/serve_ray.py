"""Serves a model and its adapters on every device of a cluster with Ray Serve.

    pip install 'jax-dora[serve,ray]'
    python examples/serve_ray.py --model FOLDER --adapters DIR --replicas 2

Each replica runs a complete `jax_dora.serve` server at a local address of its host. The ingress has
OpenAI's interface and forwards requests, preferably to a replica that has used their adapter
before. If a replica dies, its requests are sent to another one, except streams that have already
begun. FOLDER and DIR have to be at the same path on all hosts.
"""

import argparse
import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jax_dora.serve import Server, Settings
from jax_dora.serve.errors import ApiError
from jax_dora.serve.http import read_body

TRIES = 5
# The headers of a request that a server checks.
HEADERS = (b"content-type", b"authorization")


class Replica:
    """One server, on one device."""

    def __init__(self, settings: Settings) -> None:
        server = Server(settings)
        host, port = server.bind()
        threading.Thread(target=server.run, daemon=True).start()
        self._client = httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=None)

    @serve.multiplexed(max_num_models_per_replica=64)
    async def adapter(self, name: str) -> str:
        """Tells Ray that this replica has used an adapter; the replica's server loads it."""
        return name

    async def ask(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> AsyncIterator[Any]:
        """Yields the status and the content type, and then the parts of the answer."""
        if name := serve.get_multiplexed_model_id():
            await self.adapter(name)
        async with self._client.stream(method, path, content=body, headers=headers) as answer:
            yield answer.status_code, answer.headers.get("content-type", "")
            async for part in answer.aiter_bytes():
                yield part

    async def process(self) -> int:
        """Returns the id of its process."""
        return os.getpid()


class Ingress:
    """Forwards requests to replicas, according to the adapter that they name."""

    def __init__(self, replicas: Any, body_bytes: int) -> None:
        self._replicas, self._body_bytes = replicas.options(stream=True), body_bytes

    async def __call__(self, request: Request) -> Response:
        try:
            body = await read_body(request, self._body_bytes)
        except ApiError as error:
            return JSONResponse(error.body(), error.status)
        try:
            name = json.loads(body)["model"] if body else ""
        except (ValueError, TypeError, KeyError, RecursionError):
            name = ""  # the replica will respond with an error
        handle = self._replicas.options(multiplexed_model_id=name if isinstance(name, str) else "")
        status, kind, first, rest = await self._ask(handle, request, body)

        async def answer() -> AsyncIterator[bytes]:
            yield first
            async for part in rest:
                yield part

        return StreamingResponse(answer(), status, media_type=kind)

    async def _ask(
        self, handle: Any, request: Request, body: bytes
    ) -> tuple[int, str, bytes, AsyncIterator[bytes]]:
        """Returns an answer's status, content type, first part and remaining parts.

        Tries again if a replica dies. If the answer is not a stream, the first part is the whole
        answer.
        """
        headers = [one for one in request.headers.raw if one[0] in HEADERS]
        tries = 0
        while True:
            try:
                parts = handle.ask.remote(request.method, request.url.path, headers, body)
                status, kind = await anext(parts)
                first = await anext(parts, b"")
                if not kind.startswith("text/event-stream"):
                    first += b"".join([part async for part in parts])
                return status, kind, first, parts
            except RayError:
                tries += 1
                if tries == TRIES:
                    raise
                await asyncio.sleep(0.2 * tries)


def application(settings: Settings, replicas: int, devices: float) -> Any:
    """Returns an application for `ray.serve.run` with `replicas` servers.

    Args:
        settings: the settings of each server.
        replicas: the number of servers.
        devices: the number of GPUs of each server.
    """
    replica = serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=settings.batch + settings.queue,
        ray_actor_options={"num_gpus": devices},
    )(Replica)
    ingress = serve.deployment(max_ongoing_requests=10_000)(Ingress)
    return ingress.bind(replica.bind(settings), settings.body_bytes)


def main() -> None:
    """Serves until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=1.0, help="GPUs of a replica")
    args = parser.parse_args()
    settings = Settings(args.model.resolve(), args.adapters.resolve(), port=0)
    serve.run(application(settings, args.replicas, args.gpus), blocking=True)


if __name__ == "__main__":
    main()
