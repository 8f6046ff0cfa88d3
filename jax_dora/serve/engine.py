"""Continuous batching: requests join and leave between steps.

Every turn launches at most one program that reads pieces of prompts and one that draws a token for
every row that is going, and then says what the turn before has drawn: while the device computes,
the host makes text. So an answer's end is seen one step late, and that step's token is dropped.
"""

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from jax_dora.bank.slot_cache import SlotCache
from jax_dora.models.text import TextStream
from jax_dora.serve.draw import Drawn
from jax_dora.serve.metrics import Metrics
from jax_dora.serve.request import Answer, Piece, Request, Token
from jax_dora.serve.runner import ModelRunner, PromptPiece


class QueueFullError(Exception):
    """No more requests may wait."""


class Engine:
    """Answers requests. `submit` and `cancel` may be called from any thread, `turn` from one."""

    def __init__(
        self,
        runner: ModelRunner,
        bank: SlotCache | None,
        tokenizer: Tokenizer,
        ends: Collection[int],
        *,
        queue: int,
        metrics: Metrics,
    ) -> None:
        """
        Args:
          bank: the adapters in slots, by what requests name; None for the base alone.
          ends: tokens that end a text.
          queue: so many requests may wait.
        """
        self.metrics = metrics
        self._runner, self._bank = runner, bank
        self.capacity = runner.capacity  # tokens of a prompt and its answer together
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        self._queue = queue
        self._changed = threading.Condition()
        self._waiting: deque[Answer] = deque()
        self._rows: list[Answer | None] = [None] * runner.rows
        self._launched: list[tuple[Drawn, list[tuple[int, Answer]]]] = []
        self._failed = ""

    @property
    def free_rows(self) -> int:
        return self._rows.count(None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> Answer:
        """Queues a request."""
        size = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1 or size > self.capacity:
            raise ValueError(
                f"{len(request.prompt)} tokens of prompt and max_tokens {request.max_tokens}; "
                f"expected one or more of each, and {self.capacity} together at most"
            )
        before = request.prompt if request.continues_prompt else ()
        answer = Answer(request, TextStream(self._tokenizer, request.sampling.stop, before=before))
        with self._changed:
            if self._failed:
                raise RuntimeError(self._failed)
            if len(self._waiting) >= self._queue:
                raise QueueFullError(f"{len(self._waiting)} requests wait, as many as may")
            self._waiting.append(answer)
            self._changed.notify()
        return answer

    def cancel(self, answer: Answer) -> None:
        """Drops a request whose answer nobody waits for."""
        with self._changed:
            answer.is_cancelled = True
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Returns when a request comes or goes, or after some time."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(seconds)

    def fail(self, reason: str) -> None:
        """Ends every request with an error, and takes no more."""
        with self._changed:
            self._failed = reason
            waiting, self._waiting = self._waiting, deque()
        for answer in (*waiting, *filter(None, self._rows)):
            self._end(answer, Piece(finish="error", error=reason))
        self._launched = []

    def turn(self) -> bool:
        """Does what can be done now; returns whether there was anything."""
        self._drop_cancelled()
        self._admit()
        going_on = self._launched
        self._launched = [*self._prefill(), *self._decode()]
        for drawn, _ in self._launched:
            for array in drawn[:2]:
                array.copy_to_host_async()
        for drawn, answers in going_on:
            self._deliver(drawn, answers)
        self.metrics.running.set(len(self._rows) - self.free_rows)
        self.metrics.waiting.set(len(self._waiting))
        return bool(going_on or self._launched)

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [one for one in self._waiting if one.is_cancelled]
            for one in gone:
                self._waiting.remove(one)
        running = [one for one in self._rows if one is not None and one.is_cancelled]
        for one in (*gone, *running):
            self._end(one, Piece(finish="cancelled"))

    def _admit(self) -> None:
        """Gives free rows to those who wait: in turn, but who would have to wait for a slot of the
        bank is overtaken, as often as there are rows."""
        free = [row for row, one in enumerate(self._rows) if one is None]
        if not free:
            return
        with self._changed:
            waiting = list(self._waiting)
        joined: list[Answer] = []
        held_up: list[Answer] = []
        for answer in waiting:
            if not free or any(one.overtaken >= len(self._rows) for one in held_up):
                break
            slot = self._slot(answer)
            if slot is None:
                held_up.append(answer)
                continue
            joined.append(answer)
            if answer.is_finished:
                continue
            answer.row = free.pop(0)
            self._rows[answer.row] = answer
            self._runner.assign_row(answer.row, answer.request, slot)
            self.metrics.queued.observe(time.monotonic() - answer.request.arrival)
            for one in held_up:
                one.overtaken += 1
        with self._changed:
            for answer in joined:
                self._waiting.remove(answer)

    def _slot(self, answer: Answer) -> int | None:
        """Returns the slot of a request's adapter, pinned; None where it has to wait for one."""
        adapter = answer.request.adapter
        if adapter is None or self._bank is None:
            return -1
        is_new = adapter not in self._bank
        begin = time.monotonic()
        try:
            slot = self._bank.pin(adapter, adapter.value)
        except Exception as error:  # one adapter that cannot be loaded costs no other request
            self._end(answer, Piece(finish="error", error=f"the adapter cannot be loaded: {error}"))
            return -1
        if is_new and slot is not None:
            self.metrics.loads.observe(time.monotonic() - begin)
        return slot

    def _prefill(self) -> Iterable[tuple[Drawn, list[tuple[int, Answer]]]]:
        """Launches the next pieces of prompts: the longest waiting, and those cut as it is."""
        reading = [one for one in self._rows if one is not None and one.left]
        if not reading:
            return
        reading.sort(key=lambda one: one.request.arrival)
        width = self._runner.width(reading[0].left)
        alike = [one for one in reading if self._runner.width(one.left) == width]
        alike = alike[: self._runner.prompts_per_call[width]]
        parts = []
        for one in alike:
            piece = one.request.prompt[one.read : one.read + width]
            parts.append(PromptPiece(one.row, piece, one.read))
            one.read += len(piece)
        drawn = self._runner.prefill(parts, width)
        self.metrics.prompt_tokens.inc(sum(len(part.tokens) for part in parts))
        begun = [(one.row, one) for one in alike if not one.left]
        for _, one in begun:
            one.launched = 1
        yield drawn, begun

    def _decode(self) -> Iterable[tuple[Drawn, list[tuple[int, Answer]]]]:
        """Launches the next token of every row that has read its prompt."""
        going = [(row, one) for row, one in enumerate(self._rows) if one and one.is_decoding]
        if not going:
            return
        drawn = self._runner.decode(row for row, _ in going)
        for _, one in going:
            one.launched += 1
        yield drawn, going

    def _deliver(self, drawn: Drawn, answers: list[tuple[int, Answer]]) -> None:
        """Tells those who wait which tokens have been drawn for their rows."""
        going = [(row, one) for row, one in answers if not one.is_finished]
        if not going:
            return
        tokens, finite = np.asarray(drawn.tokens), np.asarray(drawn.finite)
        told = None
        if any(one.request.sampling.logprobs is not None for _, one in going):
            told = jax.device_get(drawn[2:])
        for row, one in going:
            if finite[row]:
                self._add(one, int(tokens[row]), row, told)
            else:
                error = "the model's logits are not finite; is its adapter sound?"
                self._end(one, Piece(finish="error", error=error))

    def _add(self, answer: Answer, token: int, row: int, told: Any) -> None:
        """Adds a token to an answer, and ends it where it is complete."""
        request = answer.request
        if not answer.drawn:
            self.metrics.first_token.observe(time.monotonic() - request.arrival)
        if token in self._ends:
            self._end(answer, Piece(answer.stream.end(), finish="stop"))
            return
        answer.drawn += 1
        self.metrics.tokens.inc()
        text = answer.stream.add(token)
        tokens = (_token(token, row, request.sampling.logprobs, told),)
        if answer.stream.stopped:
            self._end(answer, Piece(text, tokens, "stop"))
        elif answer.drawn == request.max_tokens:
            text += answer.stream.end()
            finish = "stop" if answer.stream.stopped else "length"
            self._end(answer, Piece(text, tokens, finish))
        else:
            request.sink(Piece(text, tokens))

    def _end(self, answer: Answer, piece: Piece) -> None:
        """Ends an answer with its last piece, and frees what it holds."""
        if answer.is_finished:
            return
        answer.is_finished = True
        if answer.row >= 0:
            self._rows[answer.row] = None
            self._runner.free_row(answer.row)
            if self._bank and answer.request.adapter is not None:
                self._bank.unpin(answer.request.adapter)
        self.metrics.answers.labels(piece.finish).inc()
        self.metrics.seconds.observe(time.monotonic() - answer.request.arrival)
        answer.request.sink(piece)


def _token(token: int, row: int, count: int | None, told: Any) -> Token:
    if count is None:
        return Token(token, float("nan"))
    logprobs, likeliest, theirs = told
    pairs = zip(likeliest[row, :count], theirs[row, :count], strict=True)
    return Token(
        token,
        float(logprobs[row]),
        tuple(Token(int(one), float(logprob)) for one, logprob in pairs),
    )
