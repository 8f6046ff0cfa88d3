"""A server on every device of a cluster, behind Ray Serve: requests go to where their adapter lies.

    pip install 'jax-dora[serve,ray]'
    python examples/serve_ray.py --model FOLDER --adapters DIR --replicas 2

Each replica is a whole `jax_dora.serve` server at an address of its own host that nobody else
knows; the ingress speaks OpenAI's interface and hands bodies on. A request whose replica dies is
asked of another one, unless it is a stream that has begun. FOLDER and DIR lie at the same path
everywhere.
"""

import argparse
import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jax_dora.serve import Server, Settings

TRIES = 5


class Replica:
    """One server, on one device."""

    def __init__(self, settings: Settings) -> None:
        server = Server(settings)
        host, port = server.bind()
        threading.Thread(target=server.run, daemon=True).start()
        self._client = httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=None)

    @serve.multiplexed(max_num_models_per_replica=64)
    async def adapter(self, name: str) -> str:
        """Tells Ray that this replica has met an adapter; its own server loads it."""
        return name

    async def ask(self, method: str, path: str, body: bytes) -> AsyncIterator[Any]:
        """Yields the status, the type, and then the answer as it comes."""
        if name := serve.get_multiplexed_model_id():
            await self.adapter(name)
        headers = {"content-type": "application/json"}
        async with self._client.stream(method, path, content=body, headers=headers) as answer:
            yield answer.status_code, answer.headers.get("content-type", "")
            async for part in answer.aiter_bytes():
                yield part

    async def process(self) -> int:
        """Returns the number of its process."""
        return os.getpid()


class Ingress:
    """Hands requests on, by the adapter that they name."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        try:
            name = (await request.json())["model"] if body else ""
        except (ValueError, TypeError, KeyError):
            name = ""  # the replica says what is wrong
        handle = self._replicas.options(multiplexed_model_id=name if isinstance(name, str) else "")
        status, kind, first, rest = await self._begun(handle, request, body)

        async def answer() -> AsyncIterator[bytes]:
            yield first
            async for part in rest:
                yield part

        return StreamingResponse(answer(), status, media_type=kind)

    async def _begun(
        self, handle: Any, request: Request, body: bytes
    ) -> tuple[int, str, bytes, AsyncIterator[bytes]]:
        """Returns an answer's status, type and beginning, from the first replica that lives; all
        of one that is no stream."""
        tries = 0
        while True:
            try:
                parts = handle.ask.remote(request.method, request.url.path, body)
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
    """Returns the application for `ray.serve.run`: `replicas` servers, each with so many GPUs."""
    replica = serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=settings.batch + settings.queue,
        ray_actor_options={"num_gpus": devices},
    )(Replica)
    ingress = serve.deployment(max_ongoing_requests=10_000)(Ingress)
    return ingress.bind(replica.bind(settings))


def main() -> None:
    """Serves until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=1.0, help="of a replica")
    args = parser.parse_args()
    settings = Settings(args.model.resolve(), args.adapters.resolve(), port=0)
    serve.run(application(settings, args.replicas, args.gpus), blocking=True)


if __name__ == "__main__":
    main()
