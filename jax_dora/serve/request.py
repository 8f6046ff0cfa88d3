"""The requests that the engine gets, and the answers that it gives."""

import dataclasses
import time
from collections.abc import Callable

from jax_dora.models.text import TextStream
from jax_dora.serve.adapters import ServedAdapter

TOP_LOGPROBS = 20  # the most that may be asked for, as in OpenAI's interface


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of an answer, or that it might have had.

    Attributes:
      logprob: the logarithm of its probability before temperature and top_p; NaN where none was
        asked for.
      likeliest: in its place, so many as were asked for, the likeliest first.
    """

    token: int
    logprob: float
    likeliest: tuple["Token", ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an answer.

    Attributes:
      text: what can be said by now: nothing that a stop string may yet take back.
      tokens: those drawn since the last piece.
      finish: "stop" or "length" on an answer's last piece; "error" where it could not be given.
      error: why not.
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: str | None = None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The settings by which an answer is drawn and ended, and what is reported of its tokens.

    Attributes:
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_p: of the likeliest tokens alone that have this probability together (arXiv 1904.09751).
      seed: of the draws, 64 bits. They depend on it and on the place in the text, on nothing else.
      stop: texts before which an answer ends.
      logprobs: how many of the likeliest tokens are told with each; None for no probabilities.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how it is continued.

    Attributes:
      prompt: its tokens, one or more.
      max_tokens: the answer has at most so many.
      sink: is called with every `Piece` as it comes, from the engine's thread.
      adapter: None for the base alone.
      continues_prompt: whether the answer's text goes on from the prompt's, with the space between them.
      asked: when it came, by `time.monotonic`.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sink: Callable[[Piece], None]
    adapter: ServedAdapter | None = None
    sampling: SamplingParams = SamplingParams()
    continues_prompt: bool = False
    arrival: float = dataclasses.field(default_factory=time.monotonic)


class Answer:
    """A request on its way through the engine; what `Engine.submit` gives, to be cancelled by."""

    def __init__(self, request: Request, stream: TextStream) -> None:
        self.request, self.stream = request, stream
        self.row = -1
        self.read = 0  # tokens of the prompt that the device was given
        self.launched = 0  # tokens that the device was asked to draw
        self.drawn = 0  # of those, what was said
        self.overtaken = 0
        self.is_cancelled = self.is_finished = False

    @property
    def left(self) -> int:
        """Returns how many tokens of the prompt are yet to be read."""
        return len(self.request.prompt) - self.read

    @property
    def is_decoding(self) -> bool:
        """Returns whether its next step draws a token."""
        return not self.is_finished and not self.left and self.launched < self.request.max_tokens
