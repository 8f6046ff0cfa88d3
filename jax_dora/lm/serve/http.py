"""OpenAI's HTTP interface, as a Starlette application."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, Counter
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import jax_dora
from dora_common.fields import reject_duplicate_fields
from jax_dora.lm.models.tokenizer import TextSettings
from jax_dora.lm.serve import body as bodies
from jax_dora.lm.serve.answers import Chat, Choice, Completion, Writer
from jax_dora.lm.serve.body import Fields, Prompt
from jax_dora.lm.serve.errors import ApiError
from jax_dora.lm.serve.responses import EventStream, Pieces, json_response, whole_answers
from jax_dora.lm.serve.service import Service

BODY_SECONDS = 30.0
Ready = Callable[[], bool]
Lifespan = Callable[[Any], contextlib.AbstractAsyncContextManager[None]]


def make_app(
    service: Service,
    *,
    lifespan: Lifespan,
    ready: Ready,
    api_key: str | None,
    allowed_origins: Sequence[str],
    body_bytes: int,
) -> ASGIApp:
    """Returns the ASGI application.

    Args:
      service: answers the requests.
      lifespan: a context in which the engine and the scans of adapters run.
      ready: returns whether the engine is running.
      api_key: the key that clients have to send, or None.
      allowed_origins: the origins whose pages may ask in a browser.
      body_bytes: the maximum size of a request's body.
    """
    handlers = _Handlers(service, ready, body_bytes)
    routes = [
        Route("/v1/models", handlers.models, methods=["GET"]),
        Route("/v1/models/{name:path}", handlers.model, methods=["GET"]),
        Route("/v1/completions", handlers.completions, methods=["POST"]),
        Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
        Route("/tokenize", handlers.tokenize, methods=["POST"]),
        Route("/detokenize", handlers.detokenize, methods=["POST"]),
        Route("/metrics", handlers.metrics, methods=["GET"]),
        Route("/version", handlers.version, methods=["GET"]),
        Route("/health", handlers.health, methods=["GET"]),
    ]

    async def respond(request: Request, error: Exception) -> Response:
        headers = getattr(error, "headers", None)  # Starlette's: the methods that a path supports
        if not isinstance(error, ApiError):
            error = _as_api_error(request, error)
        service.engine.metrics.refused.labels(error.status).inc()
        return json_response(error.body(), error.status, headers)

    handled: Any = dict.fromkeys((ApiError, 404, 405, 500), respond)
    app: ASGIApp = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handled)
    if api_key is not None:
        app = _RequireKey(app, api_key, service.engine.metrics.refused)
    if allowed_origins:  # around the check of the key, which a browser's first question has not
        app = CORSMiddleware(
            app, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _as_api_error(request: Request, error: Exception) -> ApiError:
    match getattr(error, "status_code", 500):
        case 404:
            message = f"There is no {request.url.path[:200]!r} on this server"
            return ApiError(404, message, code="unknown_url")
        case 405:
            return ApiError(405, f"{request.url.path} does not support {request.method[:20]}")
    return ApiError(500, "internal server error; see the server's log")


async def read_body(request: Request, limit: int) -> bytes:
    """Returns the body of a request.

    Raises:
      ApiError: the body has more than `limit` bytes or takes too long, or the client disconnects.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _bounded_body(request, limit)
    except TimeoutError:
        raise ApiError(408, f"the body took more than {BODY_SECONDS:.0f} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client has disconnected") from None


async def _bounded_body(request: Request, limit: int) -> bytes:
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            body += part
        # Clients read the response only after they have sent the whole body. So up to 16 times the
        # limit is received and dropped.
        elif size > 16 * limit:
            break
    if size > limit:
        raise ApiError(413, f"the body has more than {limit} bytes, this server's maximum")
    return bytes(body)


class _Handlers:
    """The handlers of the routes."""

    def __init__(self, service: Service, ready: Ready, body_bytes: int) -> None:
        self._service, self._ready, self._body_bytes = service, ready, body_bytes

    async def health(self, _: Request) -> Response:
        is_ready = self._ready()
        return json_response({"status": "ok" if is_ready else "failed"}, 200 if is_ready else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.engine.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, _: Request) -> Response:
        return json_response({"version": jax_dora.__version__})

    async def tokenize(self, request: Request) -> Response:
        """Answers with the tokens of a text or of a chat, in vLLM's format."""
        name, prompt, options = bodies.tokenization(await self._value(request))
        texts = await asyncio.to_thread(self._texts, name)
        tokens = await asyncio.to_thread(self._service.tokens, prompt, texts, **options)
        length = self._service.engine.capacity
        return json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """Answers with the text of tokens, in vLLM's format."""
        name, tokens = bodies.detokenization(await self._value(request))
        texts = await asyncio.to_thread(self._texts, name)
        return json_response({"prompt": self._service.text(tokens, texts)})

    def _texts(self, name: str | None) -> TextSettings:
        return self._service.texts_of(self._service.adapter(name or self._service.name))

    async def models(self, _: Request) -> Response:
        data = [_model(name, self._service.name) for name in self._service.models()]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.check_name(name)
        return json_response(_model(name, self._service.name))

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, bodies.completion, Completion)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, bodies.chat, Chat)

    async def _answer(
        self,
        request: Request,
        parse: Callable[[Any], tuple[Fields, list[Prompt]]],
        kind: type[Choice],
    ) -> Response:
        """Answers a completion or a chat.

        Args:
          request: the request.
          parse: parses the body into fields and prompts.
          kind: formats an answer.
        """
        service = self._service
        fields, prompts = parse(await self._value(request))
        # In threads, since reading an adapter and long prompts take time, and other requests must
        # not wait.
        adapter = await asyncio.to_thread(service.adapter, fields.model)
        texts = service.texts_of(adapter)

        def tokenize() -> list[tuple[list[int], str]]:
            tokens = [service.tokens(one, texts, fields.template_variables) for one in prompts]
            pairs = zip(prompts, tokens, strict=True)
            return [
                (ids, service.echo(one, ids, texts) if fields.echo else "") for one, ids in pairs
            ]

        pairs = await asyncio.to_thread(tokenize)
        pieces = Pieces(len(pairs) * fields.n)
        answers = service.submit(
            fields, adapter, pairs, pieces.put, continues_prompt=kind.continues_prompt
        )

        def cancel() -> None:
            for one in answers:
                service.engine.cancel(one)

        options = {"has_logprobs": fields.logprobs is not None}
        choices = [
            kind(number, texts.tokenizer, echo=pairs[number // fields.n][1], **options)
            for number in range(len(answers))
        ]
        count, usage = sum(len(tokens) for tokens, _ in pairs), fields.continuous_usage
        writer = Writer(fields.model, choices, count, continuous_usage=usage)
        if fields.stream:
            return EventStream(pieces, writer, fields.include_usage, cancel)
        try:
            return await whole_answers(request, pieces, writer)
        finally:
            cancel()

    async def _value(self, request: Request) -> Any:
        """Returns the JSON value in the body of a request."""
        body = await self._body(request)
        try:
            return json.loads(body, object_pairs_hook=reject_duplicate_fields)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}") from error

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # This also prevents requests from other web sites: for this type, a browser first asks
            # the server for permission.
            raise ApiError(415, f"content-type is {kind[:100]!r}; expected application/json")
        return await read_body(request, self._body_bytes)


class _RequireKey:
    """Middleware that rejects requests without the API key, except to /health."""

    def __init__(self, app: ASGIApp, key: str, refused: Counter) -> None:
        self._app, self._key, self._refused = app, key.encode(), refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            is_known = secrets.compare_digest(key.strip(), self._key)
            if scheme.lower() != b"bearer" or not is_known:
                message = "The API key is missing or wrong; expected 'Authorization: Bearer KEY'"
                error = ApiError(401, message, code="invalid_api_key")
                self._refused.labels(401).inc()
                headers = {"www-authenticate": "Bearer"}
                await json_response(error.body(), 401, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _model(name: str, base: str) -> dict[str, Any]:
    parent = None if name == base else base
    return {"id": name, "object": "model", "created": 0, "owned_by": "jax_dora", "parent": parent}
