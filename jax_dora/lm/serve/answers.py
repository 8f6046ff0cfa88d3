"""Formats answers as OpenAI's interface does: as a whole, or as a stream of events."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from jax_dora.lm.models.text import TextStream
from jax_dora.lm.serve.request import Piece, Token

TOKEN_ID_PREFIX = "token_id:"  # for the name of a token that is not valid text on its own


class Writer:
    """Formats one answer. The subclasses `Completion` and `Chat` differ in the fields for the text.

    Attributes:
      kind: the "object" field of an answer.
      event_kind: the "object" field of an event.
      prefix: the beginning of the "id" field.
      continues_prompt: whether the text of the answer continues the text of the prompt.
    """

    kind, event_kind, prefix = "", "", ""
    continues_prompt = False

    def __init__(self, model: str, tokenizer: Tokenizer, prompt: int, has_logprobs: bool) -> None:
        """
        Args:
          model: the name of the model or adapter.
          tokenizer: the tokenizer of the model or adapter.
          prompt: the number of tokens of the prompt.
          has_logprobs: whether the answer has log probabilities.
        """
        self._tokenizer, self._prompt, self._has_logprobs = tokenizer, prompt, has_logprobs
        self._count = 0
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the body of a response with a whole answer."""
        tokens = [token for piece in pieces for token in piece.tokens]
        self._count = len(tokens) + pieces[-1].ended
        text = "".join(piece.text for piece in pieces)
        choice = self._choice(text) | self._common_fields(tokens, pieces[-1].finish)
        head = self._head | {"object": self.kind}
        return head | {"choices": [choice], "usage": self._usage()}

    def event(self, piece: Piece) -> str:
        """Returns the event of a piece; "" if the piece has nothing to report."""
        self._count += len(piece.tokens) + piece.ended
        if not piece.text and piece.finish is None and not (self._has_logprobs and piece.tokens):
            return ""
        choice = self._event_choice(piece.text) | self._common_fields(piece.tokens, piece.finish)
        return self._event([choice])

    def usage_event(self) -> str:
        """Returns the event with the numbers of tokens."""
        return self._event([], usage=self._usage())

    def first_events(self) -> list[str]:
        """Returns the events before those of the first piece."""
        return []

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event(self._head | {"object": self.event_kind, "choices": choices} | more)

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._count,
            "total_tokens": self._prompt + self._count,
        }

    def _common_fields(self, tokens: Sequence[Token], finish: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self._has_logprobs else None
        return {"index": 0, "logprobs": logprobs, "finish_reason": finish}

    def _choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _event_choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        raise NotImplementedError

    def _name(self, token: int) -> str:
        """Returns the token's text, or its id if the token is not valid text on its own."""
        text = self._text(token, skip_special_tokens=False)
        return f"{TOKEN_ID_PREFIX}{token}" if "\ufffd" in text or not text else text

    def _text(self, token: int, *, skip_special_tokens: bool) -> str:
        """Returns the text that a second copy of the token adds to the first.

        Some decoders remove a space at the beginning of a text, so the first copy does not count.
        """
        once, twice = (
            self._tokenizer.decode([token] * count, skip_special_tokens=skip_special_tokens)
            for count in (1, 2)
        )
        return twice[len(once) :]


class Completion(Writer):
    """Formats a completion of a text."""

    kind = event_kind = "text_completion"
    prefix = "cmpl"
    continues_prompt = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offset = 0
        # The text of tokens that are valid text only together.
        self._partial_text = TextStream(self._tokenizer)

    def _choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _event_choice = _choice

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        names = [self._name(one.token) for one in tokens]
        return {
            "tokens": names,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [self._top_logprobs(one) for one in tokens],
            "text_offset": [
                self._next_offset(one.token, name) for one, name in zip(tokens, names, strict=True)
            ],
        }

    def _next_offset(self, token: int, name: str) -> int:
        """Returns the offset in the text where the token begins, and advances it past the token.

        The offset of a token that is a part of a character is that of the character.
        """
        is_partial = name.startswith(TOKEN_ID_PREFIX)
        if not is_partial:
            self._offset += len(self._partial_text.end())
            self._partial_text = TextStream(self._tokenizer)
        offset = self._offset
        if is_partial:
            self._offset += len(self._partial_text.add(token))
        else:
            # Special tokens have names, but take no space in the text.
            self._offset += len(self._text(token, skip_special_tokens=True))
        return offset

    def _top_logprobs(self, token: Token) -> dict[str, float]:
        logprobs: dict[str, float] = {}
        for one in token.alternatives:
            name = self._name(one.token)
            # Several tokens can have the same text.
            logprobs[f"{TOKEN_ID_PREFIX}{one.token}" if name in logprobs else name] = one.logprob
        return logprobs


class Chat(Writer):
    """Formats the assistant's next message of a chat."""

    kind, event_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first_events(self) -> list[str]:
        delta = {"role": "assistant", "content": ""}
        return [self._event([{"index": 0, "delta": delta, "finish_reason": None}])]

    def _choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _event_choice(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        content = [
            self._entry(one) | {"top_logprobs": [self._entry(other) for other in one.alternatives]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, one: Token) -> dict[str, Any]:
        name = self._name(one.token)
        is_text = not name.startswith(TOKEN_ID_PREFIX)
        encoded = list(name.encode()) if is_text else None
        return {"token": name, "logprob": one.logprob, "bytes": encoded}


def event(body: dict[str, Any]) -> str:
    """Returns a server-sent event with a JSON body."""
    return f"data: {json.dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"
