"""Serves a model and its adapters on every device of a cluster with Ray Serve.

    pip install '.[serve,ray]'
    python examples/serve_ray.py --model FOLDER --adapters DIR --replicas 2

All flags of `jax-dora serve` apply: those of the address to Ray's proxy, and all others to each
replica. A replica is a complete `jax_dora.lm.serve` server, on one GPU or on those of `--mesh
tp=N`, at a local address of its host. The ingress has OpenAI's interface and forwards requests,
preferably to a replica that has used their adapter before. The header x-replica of an answer tells
which replica gave it. If a replica dies, its requests are sent to another one, except streams that
have already begun. A replica that dies, or whose server has failed, is replaced. FOLDER and DIR
have to be at the same path on all hosts.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import os
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from dora_common.peft.folder import find_adapter_folder
from jax_dora.lm.commands.flags import HelpFormatter, in_domain
from jax_dora.lm.commands.serve import add_flags, server_settings, warn_without_key
from jax_dora.lm.domains import NOT_NEGATIVE, integers
from jax_dora.lm.serve import Server, Settings
from jax_dora.lm.serve.adapters import NAME
from jax_dora.lm.serve.errors import ApiError
from jax_dora.lm.serve.http import read_body

TRIES = 5
# The headers of a request that a server checks.
HEADERS = (b"content-type", b"authorization")


class Replica:
    """One server, on one device or mesh."""

    def __init__(self, settings: Settings) -> None:
        server = Server(settings)
        host, port = server.bind()
        threading.Thread(target=server.run, daemon=True).start()
        # Without a limit, so that Ray's check of the health does not wait for other requests.
        limits = httpx.Limits(max_connections=None)
        url = f"http://{host}:{port}"
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)

    async def adapter(self, name: str) -> str:
        """Tells Ray that this replica has used an adapter; the replica's server loads it."""
        return name

    async def ask(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> AsyncIterator[Any]:
        """Yields the status and the headers, and then the parts of the answer."""
        if name := serve.get_multiplexed_model_id():
            await self.adapter(name)
        async with self._client.stream(method, path, content=body, headers=headers) as answer:
            replica = serve.get_replica_context().replica_id.unique_id
            kind = answer.headers.get("content-type", "")
            yield answer.status_code, {"content-type": kind, "x-replica": replica}
            async for part in answer.aiter_bytes():
                yield part

    async def check_health(self) -> None:
        """Raises an error if the server has failed, upon which Ray replaces the replica."""
        (await self._client.get("/health")).raise_for_status()

    async def process(self) -> int:
        """Returns the id of its process."""
        return os.getpid()


class Ingress:
    """Forwards requests to replicas, according to the adapter that they name."""

    def __init__(self, replicas: Any, settings: Settings) -> None:
        self._replicas, self._settings = replicas.options(stream=True), settings

    async def __call__(self, request: Request) -> Response:
        try:
            body = await read_body(request, self._settings.body_bytes)
        except ApiError as error:
            return JSONResponse(error.body(), error.status)
        name = await asyncio.to_thread(self._adapter, body)
        handle = self._replicas.options(multiplexed_model_id=name)
        status, headers, first, rest = await self._ask(handle, request, body)

        async def answer() -> AsyncIterator[bytes]:
            yield first
            async for part in rest:
                yield part

        return StreamingResponse(answer(), status, headers)

    def _adapter(self, body: bytes) -> str:
        """Returns the name of the adapter that a request asks for, or "" for any replica.

        Ray remembers the names that it is given. So it gets none that has no folder in DIR, for
        which any replica responds with an error, and not the base model's, which all replicas have.
        """
        try:
            name = json.loads(body)["model"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return ""  # the replica will respond with an error
        folder = self._settings.adapters
        if folder is None or not isinstance(name, str) or name == self._settings.base_name:
            return ""
        return name if NAME.fullmatch(name) and find_adapter_folder(folder / name) else ""

    async def _ask(
        self, handle: Any, request: Request, body: bytes
    ) -> tuple[int, dict[str, str], bytes, AsyncIterator[bytes]]:
        """Returns an answer's status, headers, first part and remaining parts.

        Tries again if a replica dies. If the answer is not a stream, the first part is the whole
        answer.
        """
        headers = [one for one in request.headers.raw if one[0] in HEADERS]
        tries = 0
        while True:
            try:
                parts = handle.ask.remote(request.method, request.url.path, headers, body)
                status, given = await anext(parts)
                first = await anext(parts, b"")
                if not given["content-type"].startswith("text/event-stream"):
                    first += b"".join([part async for part in parts])
                return status, given, first, parts
            except RayError:
                tries += 1
                if tries == TRIES:
                    raise
                await asyncio.sleep(0.2 * tries)


def application(settings: Settings, replicas: int, gpus: float) -> Any:
    """Returns an application for `ray.serve.run` with `replicas` servers.

    Args:
        settings: the settings of each server, except for the address.
        replicas: the number of servers.
        gpus: the number of GPUs of each server.
    """

    class Multiplexed(Replica):
        # A replica that loads another adapter into a slot has lost the least recently used one.
        adapter = serve.multiplexed(max_num_models_per_replica=settings.slots)(Replica.adapter)

    replica = serve.deployment(
        name="Replica",
        num_replicas=replicas,
        max_ongoing_requests=settings.batch + settings.queue,
        ray_actor_options={"num_gpus": gpus},
    )(Multiplexed)
    ingress = serve.deployment(max_ongoing_requests=10_000)(Ingress)
    local = dataclasses.replace(settings, host="127.0.0.1", port=0)
    return ingress.bind(replica.bind(local), settings)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags; `gpus` has the GPUs of a replica."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add_flags(parser)
    add = parser.add_argument_group("Ray").add_argument
    add("--replicas", type=in_domain(integers(1)), default=1, metavar="N", help="number of servers")
    add(
        "--gpus",
        type=in_domain(NOT_NEGATIVE),
        metavar="N",
        help="GPUs of a replica; those of --mesh, or 1",
    )
    args = parser.parse_args(argv)
    if args.gpus is None:
        if args.mesh == "auto":
            parser.error("--mesh auto needs --gpus, the number of GPUs of a replica")
        args.gpus = math.prod((args.mesh or {}).values())
    return args


def main() -> None:
    """Serves until Ctrl-C."""
    args = parse()
    settings = server_settings(args)
    folders = {"model": settings.model.resolve()}
    if settings.adapters is not None:
        folders["adapters"] = settings.adapters.resolve()
    settings = dataclasses.replace(settings, **folders)
    warn_without_key(args, print)
    serve.start(http_options={"host": args.host, "port": args.port})
    serve.run(application(settings, args.replicas, args.gpus), blocking=True)


if __name__ == "__main__":
    main()
