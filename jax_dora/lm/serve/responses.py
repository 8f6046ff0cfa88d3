"""The responses of the server: JSON, and streams of events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jax_dora.lm.serve.answers import DONE, Writer, event
from jax_dora.lm.serve.errors import ApiError
from jax_dora.lm.serve.request import Piece

# These errors can be sent before the whole body was received. The connection is then closed, since
# the server would otherwise have to receive the rest of the body.
CLOSING_STATUSES = (401, 404, 405, 408, 413, 415)


class Pieces:
    """A queue for the pieces of answers, from the engine's thread to the event loop.

    It ends with the last piece of the last answer, or with an answer that has failed.
    """

    def __init__(self, answers: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self.answers = answers

    def put(self, number: int, piece: Piece) -> None:
        # The loop may be closed already, and then nobody waits for the piece.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, piece))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        left = self.answers
        while left:
            number, piece = await self._queue.get()
            if piece.finish in ("error", "abort"):
                raise ApiError(500, piece.error or "the server has stopped")
            left -= piece.finish is not None
            yield number, piece


class EventStream(StreamingResponse):
    """Answers as server-sent events. Cancels the requests at the end, so that rows are freed."""

    def __init__(
        self, pieces: Pieces, writer: Writer, include_usage: bool, cancel: Callable[[], None]
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
        for first in writer.first_events():
            yield first
        try:
            async for number, piece in self._pieces:
                if text := writer.event(number, piece):
                    yield text
        except ApiError as error:
            yield event(error.body())
            return
        if include_usage:
            yield writer.usage_event()
        yield DONE


async def whole_answers(request: Request, pieces: Pieces, writer: Writer) -> Response:
    """Waits for the whole answers, or until the client disconnects."""

    async def collect() -> list[list[Piece]]:
        answers: list[list[Piece]] = [[] for _ in range(pieces.answers)]
        async for number, piece in pieces:
            answers[number].append(piece)
        return answers

    collected = asyncio.create_task(collect())
    disconnected = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((collected, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not collected.done():
            return Response(status_code=499)  # the client does not receive it
        return json_response(writer.whole(await collected))
    finally:
        for task in (collected, disconnected):
            task.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a response with a body of JSON."""
    headers = dict(headers or {})
    if status in CLOSING_STATUSES:
        headers["connection"] = "close"
    # json.dumps escapes all but ASCII, including lone surrogates that an error message may quote.
    return Response(json.dumps(body), status, headers, media_type="application/json")
