"""The requests that the engine receives, and the answers that it returns."""

import dataclasses
import time
from collections.abc import Callable

from jax_dora.bank import StoredAdapter
from jax_dora.lm.models.sampling import GREEDY, Sampling
from jax_dora.lm.models.text import TextStream


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a prompt or of an answer, or an alternative to one.

    Attributes:
      token: the token's id.
      logprob: the logarithm of its probability, before `Sampling` is applied; None if the request
        does not ask for it, and for the first token of a prompt.
      alternatives: the most likely tokens at the same position, the most likely first; as many as
        requested.
    """

    token: int
    logprob: float | None
    alternatives: tuple["Token", ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an answer.

    Attributes:
      text: the text that is final; the beginning of a possible stop string is held back.
      tokens: the tokens since the last piece. A token that ends the answer has no text.
      prompt: the tokens of the prompt, in the first piece, if the request asks for their
        probabilities.
      finish: None except in an answer's last piece, which has "stop", "length", "abort" if the
        request was cancelled, or "error" if it failed.
      error: the reason for "error".
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: str | None = None
    error: str = ""
    prompt: tuple[Token, ...] = ()


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how to continue it.

    Attributes:
      prompt: the prompt's tokens, at least one.
      max_tokens: the maximum number of tokens of the answer; 0 for those of the prompt alone.
      sink: a function that the engine calls in its thread with every `Piece`.
      model: the name of the adapter or the base model, for the metrics.
      adapter: the adapter to use; None for the base model. Its `extra` is how it reads and writes
        text; None if as the base model does.
      sampling: how tokens are drawn.
      stop: strings that end the answer, which are not part of it.
      stop_token_ids: tokens that end the answer, in addition to the model's and the adapter's.
      ignore_eos: whether only `stop_token_ids` and `stop` end the answer.
      logprobs: the number of most likely tokens to report at each position; None for no
        probabilities.
      continues_prompt: whether the answer continues the prompt's text, so that a space between them
        belongs to the answer.
      echo: a text that the answer begins with: the prompt's, or none.
      scores_prompt: whether to report the probabilities of the prompt's tokens.
      arrival: when the request arrived, by `time.monotonic`.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sink: Callable[[Piece], None]
    model: str = ""
    adapter: StoredAdapter | None = None
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    continues_prompt: bool = False
    echo: str = ""
    scores_prompt: bool = False
    arrival: float = dataclasses.field(default_factory=time.monotonic)


class Answer:
    """The state of a request in the engine, returned by `Engine.submit`."""

    def __init__(self, request: Request, stream: TextStream, ends: frozenset[int]) -> None:
        self.request, self.stream, self.ends = request, stream, ends
        self.row = -1
        self.prefilled = 0  # prompt tokens that were given to the device
        self.launched = 0  # tokens that the device was asked to draw
        self.drawn = 0  # tokens that the device has drawn and the engine has processed
        self.overtaken = 0  # later requests that got a row while this one waited for a slot
        self.latest = request.arrival  # when it had its latest token
        self.prompt: list[Token] = []  # with probabilities, until the first piece is sent
        self.is_cancelled = self.is_finished = False

    @property
    def prompt_left(self) -> int:
        """The number of prompt tokens that the device has yet to process."""
        return len(self.request.prompt) - self.prefilled

    @property
    def is_decoding(self) -> bool:
        """Whether the next decoding step draws a token for this request."""
        return (
            not self.is_finished
            and not self.prompt_left
            and self.launched < self.request.max_tokens
        )
