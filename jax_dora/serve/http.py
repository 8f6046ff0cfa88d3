"""OpenAI's HTTP interface, as a Starlette application."""

import asyncio
import contextlib
import functools
import json
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dora_common.fields import reject_duplicate_fields
from jax_dora.serve import body as bodies
from jax_dora.serve import metrics
from jax_dora.serve.answers import DONE, Chat, Completion, Writer, event
from jax_dora.serve.body import Fields
from jax_dora.serve.errors import ApiError
from jax_dora.serve.request import Piece
from jax_dora.serve.service import Service

BODY_SECONDS = 30.0
# Refused before the body was read to its end, which an open connection would go on taking in.
CLOSING_STATUSES = (401, 404, 405, 408, 413, 415)
Ready = Callable[[], bool]
Lifespan = Callable[[Any], contextlib.AbstractAsyncContextManager[None]]


def make_app(
    service: Service, *, lifespan: Lifespan, ready: Ready, api_key: str | None, body_bytes: int
) -> ASGIApp:
    """Returns the application; `lifespan` runs engine and adapters while it serves, and `ready`
    says whether both run."""
    handlers = _Handlers(service, ready, body_bytes)
    routes = [
        Route("/v1/models", handlers.models, methods=["GET"]),
        Route("/v1/models/{name:path}", handlers.model, methods=["GET"]),
        Route("/v1/completions", handlers.completions, methods=["POST"]),
        Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
        Route("/metrics", handlers.metrics, methods=["GET"]),
        Route("/health", handlers.health, methods=["GET"]),
    ]

    async def refuse(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            error = _as_api_error(request, error)
        service.engine.metrics.refused.labels(error.status).inc()
        return _json(error.body(), error.status, close=error.status in CLOSING_STATUSES)

    handled: Any = dict.fromkeys((ApiError, 404, 405, 500), refuse)
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handled)
    return app if api_key is None else _Key(app, api_key, service.engine.metrics.refused)


def _as_api_error(request: Request, error: Exception) -> ApiError:
    match getattr(error, "status_code", 500):
        case 404:
            told = f"There is no {request.url.path[:200]!r} here"
            return ApiError(404, told, code="unknown_url")
        case 405:
            return ApiError(405, f"{request.url.path} takes no {request.method[:20]}")
    return ApiError(500, "the server made a mistake; see its log")


class _Handlers:
    def __init__(self, service: Service, ready: Ready, body_bytes: int) -> None:
        self._service, self._ready, self._body_bytes = service, ready, body_bytes

    async def health(self, _: Request) -> Response:
        is_ready = self._ready()
        return _json({"status": "ok" if is_ready else "failed"}, 200 if is_ready else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.engine.metrics.text(), media_type=metrics.CONTENT_TYPE)

    async def models(self, _: Request) -> Response:
        data = [_model(name, self._service.name) for name in self._service.models()]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.served(name)
        return _json(_model(name, self._service.name))

    async def completions(self, request: Request) -> Response:
        tokens = self._service.text_tokens
        return await self._answer(request, bodies.completion, tokens, Completion)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, bodies.chat, self._service.chat_tokens, Chat)

    async def _answer[Asked](
        self,
        request: Request,
        read: Callable[[Any], tuple[Fields, Asked]],
        tokens: Callable[[Asked], list[int]],
        kind: type[Writer],
    ) -> Response:
        service, body = self._service, await self._body(request)
        try:
            fields, asked = read(json.loads(body, object_pairs_hook=reject_duplicate_fields))
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {str(error)[:200]}") from error
        served = service.served(fields.model)
        # Long texts take their time, in which others are answered.
        prompt = await asyncio.to_thread(tokens, asked)
        pieces = _Pieces()
        answer = service.submit(
            fields, served, prompt, pieces.put, continues_prompt=kind.continues_prompt
        )
        cancel = functools.partial(service.engine.cancel, answer)
        tells = fields.sampling.logprobs is not None
        writer = kind(fields.model, service.tokenizer, len(prompt), tells)
        if fields.stream:
            return _Events(pieces, writer, fields.include_usage, cancel)
        try:
            return await _whole(request, pieces, writer)
        finally:
            cancel()

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also what keeps a page in a browser from asking unnoticed: this type needs its leave.
            raise ApiError(415, f"content-type is {kind[:100]!r}; expected application/json")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._bounded(request)
        except TimeoutError:
            raise ApiError(408, f"the body took more than {BODY_SECONDS:.0f} s") from None
        except ClientDisconnect:
            raise ApiError(400, "the client left") from None

    async def _bounded(self, request: Request) -> bytes:
        most, given, size = self._body_bytes, bytearray(), 0
        async for part in request.stream():
            size += len(part)
            if size <= most:
                given += part
            # A client reads its answer only once it has sent all; up to some size it may.
            elif size > 16 * most:
                break
        if size > most:
            raise ApiError(413, f"the body has more than {most} bytes, which is this server's most")
        return bytes(given)


class _Pieces:
    """The pieces of an answer, from the engine's thread to this loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()

    def put(self, piece: Piece) -> None:
        # A loop that is closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            piece = await self._queue.get()
            yield piece
            if piece.finish is not None:
                return


class _Events(StreamingResponse):
    """Server-sent events of an answer. However it ends, the answer's row is free then."""

    def __init__(
        self, pieces: _Pieces, writer: Writer, include_usage: bool, cancel: Callable[[], None]
    ) -> None:
        self._pieces, self._cancel = pieces, cancel
        super().__init__(
            self._events(writer, include_usage),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()

    async def _events(self, writer: Writer, include_usage: bool) -> AsyncIterator[str]:
        for one in writer.first_events():
            yield one
        async for piece in self._pieces:
            if piece.finish in ("error", "cancelled"):
                yield event(ApiError(500, piece.error or "the server ended").body())
                return
            if told := writer.event(piece):
                yield told
        if include_usage:
            yield writer.usage_event()
        yield DONE


async def _whole(request: Request, pieces: _Pieces, writer: Writer) -> Response:
    """Waits for the whole answer, or until the client hangs up."""

    async def collect() -> list[Piece]:
        return [piece async for piece in pieces]

    collected = asyncio.create_task(collect())
    gone = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((collected, gone), return_when=asyncio.FIRST_COMPLETED)
        if not collected.done():
            return Response(status_code=499)  # nobody reads it
        found = await collected
    finally:
        for task in (collected, gone):
            task.cancel()
    if found[-1].finish in ("error", "cancelled"):
        raise ApiError(500, found[-1].error or "the server ended")
    return _json(writer.whole(found))


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Key:
    """Lets nobody in who does not know the key, but to /health."""

    def __init__(self, app: ASGIApp, key: str, refused: Counter) -> None:
        self._app, self._key, self._refused = app, key.encode(), refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            is_known = secrets.compare_digest(key.strip(), self._key)
            if scheme.lower() != b"bearer" or not is_known:
                told = "The API key is missing or wrong; expected 'Authorization: Bearer KEY'"
                error = ApiError(401, told, code="invalid_api_key")
                self._refused.labels(401).inc()
                await _json(error.body(), 401, close=True)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _model(name: str, base: str) -> dict[str, Any]:
    parent = None if name == base else base
    return {"id": name, "object": "model", "created": 0, "owned_by": "jax_dora", "parent": parent}


def _json(body: Any, status: int = 200, *, close: bool = False) -> Response:
    headers = {"connection": "close"} if close else None
    # In ASCII: a client may have sent halves of letters, which its error tells of.
    return Response(json.dumps(body), status, headers, media_type="application/json")
