"""Continuous batching: requests start and end between the steps of a running batch.

Every turn of the engine launches at most two programs: one prefills pieces of prompts, and one
decodes a token for every row whose prompt is complete. Then the engine processes the tokens from
the previous turn, so that the host produces text while the device computes. The engine therefore
notices the end of an answer one step late, and drops the token of that step.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from jax_dora.bank import AdapterStore, SlotsBusy
from jax_dora.lm.models.sampling import Drawn
from jax_dora.lm.models.text import TextStream
from jax_dora.lm.serve.metrics import Metrics
from jax_dora.lm.serve.request import Answer, Piece, Request, Token
from jax_dora.lm.serve.runner import ModelRunner, PromptPiece

type Launched = tuple[Drawn, list[tuple[int, Answer]], Any, list[tuple[int, Answer, PromptPiece]]]
"""The result of a program, and the rows and answers that it draws tokens for.

Then, with a result of `ModelRunner.score`: the first row of each answer in it, and its piece.
"""


class QueueFullError(Exception):
    """Raised if the maximum number of requests is already waiting."""


class Engine:
    """Answers requests in a running batch.

    `submit` and `cancel` are thread-safe. `turn`, `wait` and `fail` have to run in one thread.
    """

    def __init__(
        self,
        runner: ModelRunner,
        adapters: AdapterStore | None,
        tokenizer: Tokenizer,
        ends: Collection[int],
        *,
        queue: int,
        metrics: Metrics,
    ) -> None:
        """
        Args:
          runner: runs the model.
          adapters: the adapters; None for the base model only.
          tokenizer: the model's tokenizer.
          ends: the tokens that end a text of the model. An adapter may have others, and another
            tokenizer.
          queue: the maximum number of waiting requests.
          metrics: the metrics to update.
        """
        self.metrics = metrics
        self._runner, self._adapters = runner, adapters
        self.capacity = runner.capacity  # tokens of a prompt and its answer together
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        self.queue = queue  # the maximum number of waiting requests
        self._changed = threading.Condition()
        self._waiting: deque[Answer] = deque()
        self._rows: list[Answer | None] = [None] * runner.rows
        self._launched: list[Launched] = []
        self._failed = ""

    @property
    def free_rows(self) -> list[int]:
        """The numbers of the rows without a request."""
        return [row for row, one in enumerate(self._rows) if one is None]

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a row."""
        return len(self._waiting)

    def submit(self, *requests: Request) -> list[Answer]:
        """Queues requests, all or none.

        Raises:
          ValueError: a prompt is empty, max_tokens is below 0, or both together exceed a row; or
            more requests are given than can wait.
          QueueFullError: too many requests are waiting.
          RuntimeError: the engine has stopped.
        """
        if len(requests) > self.queue:
            raise ValueError(f"{len(requests)} requests; expected at most {self.queue} at a time")
        answers = [self._answer(one) for one in requests]
        with self._changed:
            if self._failed:
                raise RuntimeError(self._failed)
            if len(self._waiting) + len(requests) > self.queue:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait, of {self.queue} that can wait"
                )
            self._waiting += answers
            for answer in answers:
                self.metrics.of(answer.request.model).waiting.inc()
            self._changed.notify()
        return answers

    def _answer(self, request: Request) -> Answer:
        size = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 0 or size > self.capacity:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is "
                f"{request.max_tokens}; expected at least 1 and 0, and {self.capacity} together at "
                "most"
            )
        tokenizer, ends = self._tokenizer, self._ends
        if request.adapter is not None and (texts := request.adapter.extra) is not None:
            tokenizer, ends = texts.tokenizer, frozenset(texts.end_tokens)
        ends = (frozenset() if request.ignore_eos else ends) | set(request.stop_token_ids)
        before = request.prompt if request.continues_prompt else ()
        least = request.sampling.min_tokens
        return Answer(
            request, TextStream(tokenizer, request.stop, before=before, least=least), ends
        )

    def cancel(self, answer: Answer) -> None:
        """Cancels a request, for example since its client has disconnected."""
        with self._changed:
            answer.is_cancelled = True
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Waits until a request is submitted or cancelled, at most for some seconds."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(seconds)

    def fail(self, reason: str) -> None:
        """Ends all requests with an error, and rejects new ones from now on."""
        with self._changed:
            self._failed = reason
            waiting, self._waiting = self._waiting, deque()
        for answer in (*waiting, *filter(None, self._rows)):
            self._end(answer, Piece(finish="error", error=reason))
        self._launched = []

    def turn(self) -> bool:
        """Runs one turn (see the module's docstring); returns whether there was anything to do."""
        self._drop_cancelled()
        self._admit()
        previous = self._launched
        self._launched = [*self._prefill(), *self._decode()]
        for drawn, *_ in self._launched:
            for array in drawn[:2]:
                array.copy_to_host_async()
        for drawn, answers, scores, scored in previous:
            self._add_scores(scores, scored)
            self._deliver(drawn, answers)
        return bool(previous or self._launched)

    def _drop_cancelled(self) -> None:
        with self._changed:
            waiting = [one for one in self._waiting if one.is_cancelled]
            for one in waiting:
                self._waiting.remove(one)
        running = [one for one in self._rows if one is not None and one.is_cancelled]
        for one in (*waiting, *running):
            self._end(one, Piece(finish="abort"))

    def _admit(self) -> None:
        """Gives free rows to waiting requests, in the order of their arrival.

        A request whose adapter finds no free slot in the bank keeps waiting, and later requests may
        overtake it, at most as many times as there are rows.
        """
        free = self.free_rows
        if not free:
            return
        with self._changed:
            waiting = list(self._waiting)
        admitted: list[Answer] = []
        blocked: list[Answer] = []
        for answer in waiting:
            if not free or any(one.overtaken >= len(self._rows) for one in blocked):
                break
            slot = self._acquire_adapter(answer)
            if slot is None:
                blocked.append(answer)
                continue
            admitted.append(answer)
            if answer.is_finished:
                continue
            answer.row = free.pop(0)
            self._rows[answer.row] = answer
            self._runner.assign_row(answer.row, answer.request, slot, answer.ends)
            metrics = self.metrics.of(answer.request.model)
            metrics.queued.observe(time.monotonic() - answer.request.arrival)
            metrics.waiting.dec()
            metrics.running.inc()
            for one in blocked:
                one.overtaken += 1
        with self._changed:
            for answer in admitted:
                self._waiting.remove(answer)

    def _acquire_adapter(self, answer: Answer) -> int | None:
        """Returns the slot of a request's adapter: -1 for none, None if all slots are in use.

        If the adapter cannot be loaded, this ends the request with an error and returns -1.
        """
        adapter = answer.request.adapter
        if adapter is None or self._adapters is None:
            return -1
        begin, loads = time.monotonic(), self._adapters.loads
        try:
            slot = self._adapters.acquire(adapter)
        except SlotsBusy:
            return None
        except Exception as error:  # must not affect other requests
            self._end(answer, Piece(finish="error", error=f"the adapter cannot be loaded: {error}"))
            return -1
        if self._adapters.loads > loads:
            self.metrics.loads.observe(time.monotonic() - begin)
        return slot

    def _prefill(self) -> Iterable[Launched]:
        """Launches the next piece of the oldest incomplete prompt, and of others of equal width."""
        incomplete = [one for one in self._rows if one is not None and one.prompt_left]
        if not incomplete:
            return
        incomplete.sort(key=lambda one: one.request.arrival)
        width = self._runner.width(incomplete[0].prompt_left)
        batch = [one for one in incomplete if self._runner.width(one.prompt_left) == width]
        batch = batch[: self._runner.prompts_per_call[width]]
        pieces = []
        for one in batch:
            start, end = one.prefilled, one.prefilled + width
            tokens, following = (
                one.request.prompt[start:end],
                one.request.prompt[start + 1 : end + 1],
            )
            pieces.append(PromptPiece(one.row, tokens, start, following))
            one.prefilled += len(tokens)
        drawn = self._runner.prefill(pieces, width)
        scored = [
            (number * width, *pair)
            for number, pair in enumerate(zip(batch, pieces, strict=True))
            if pair[0].request.scores_prompt
        ]
        scores = self._runner.score(pieces, width) if scored else None
        for one, piece in zip(batch, pieces, strict=True):
            self.metrics.of(one.request.model).prompt_tokens.inc(len(piece.tokens))
        complete = [(one.row, one) for one in batch if not one.prompt_left]
        for _, one in complete:
            one.launched = 1
        yield drawn, complete, scores, scored

    def _decode(self) -> Iterable[Launched]:
        """Launches a decoding step for all rows with complete prompts."""
        active = [(row, one) for row, one in enumerate(self._rows) if one and one.is_decoding]
        if not active:
            return
        drawn = self._runner.decode(row for row, _ in active)
        for _, one in active:
            one.launched += 1
        yield drawn, active, None, []

    def _add_scores(self, scores: Any, scored: list[tuple[int, Answer, PromptPiece]]) -> None:
        """Adds the probabilities of tokens of prompts to the answers that are not finished."""
        unfinished = [one for one in scored if not one[1].is_finished]
        scores = jax.device_get(scores) if unfinished else None
        for first, answer, piece in unfinished:
            if not piece.start:
                answer.prompt.append(Token(piece.tokens[0], None))
            for row, token in enumerate(piece.following, first):
                answer.prompt.append(_with_logprobs(token, row, answer.request.logprobs, scores))

    def _deliver(self, drawn: Drawn, answers: list[tuple[int, Answer]]) -> None:
        """Adds the drawn tokens to the answers that are not finished."""
        unfinished = [(row, one) for row, one in answers if not one.is_finished]
        if not unfinished:
            return
        tokens, finite = np.asarray(drawn.tokens), np.asarray(drawn.finite)
        logprobs = None
        if any(one.request.logprobs is not None for _, one in unfinished):
            logprobs = jax.device_get(drawn[2:])
        for row, one in unfinished:
            if finite[row]:
                piece = self._next_piece(one, int(tokens[row]), row, logprobs)
                if not one.drawn:
                    text = one.request.echo + piece.text
                    piece = dataclasses.replace(piece, text=text, prompt=tuple(one.prompt))
                one.drawn += 1
                if piece.finish is None:
                    one.request.sink(piece)
                else:
                    self._end(one, piece)
            else:
                error = "the model's logits are not finite; its adapter may have diverged"
                self._end(one, Piece(finish="error", error=error))

    def _next_piece(self, answer: Answer, token: int, row: int, logprobs: Any) -> Piece:
        """Returns the piece of an answer with a drawn token."""
        request, stream = answer.request, answer.stream
        metrics, now = self.metrics.of(request.model), time.monotonic()
        interval = metrics.inter_token if answer.drawn else metrics.first_token
        interval.observe(now - answer.latest)
        answer.latest = now
        if not request.max_tokens:
            return Piece(finish="length")
        metrics.tokens.inc()
        tokens = (_with_logprobs(token, row, request.logprobs, logprobs),)
        if token in answer.ends:
            return Piece(stream.end(), tokens, "stop")
        text = stream.add(token)
        if stream.stopped:
            return Piece(text, tokens, "stop")
        if answer.drawn + 1 < request.max_tokens:
            return Piece(text, tokens)
        text += stream.end()
        return Piece(text, tokens, "stop" if stream.stopped else "length")

    def _end(self, answer: Answer, piece: Piece) -> None:
        """Sends an answer its last piece, and frees its row and its adapter's slot."""
        if answer.is_finished:
            return
        answer.is_finished = True
        metrics = self.metrics.of(answer.request.model)
        (metrics.waiting if answer.row < 0 else metrics.running).dec()
        if answer.row >= 0:
            self._rows[answer.row] = None
            self._runner.free_row(answer.row)
            if self._adapters is not None and answer.request.adapter is not None:
                self._adapters.release(answer.request.adapter)
        self.metrics.answers.labels(answer.request.model, piece.finish).inc()
        metrics.seconds.observe(time.monotonic() - answer.request.arrival)
        answer.request.sink(piece)


def _with_logprobs(token: int, row: int, count: int | None, logprobs: Any) -> Token:
    """Returns a token with its probability and those of `count` alternatives; None for neither."""
    if count is None:
        return Token(token, None)
    drawn, top_tokens, top_logprobs = logprobs
    pairs = zip(top_tokens[row, :count], top_logprobs[row, :count], strict=True)
    return Token(
        token,
        float(drawn[row]),
        tuple(Token(int(one), float(logprob)) for one, logprob in pairs),
    )
