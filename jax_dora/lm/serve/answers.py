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


class Choice:
    """Formats one answer. The subclasses `Completion` and `Chat` differ in the fields for the text.

    Attributes:
      kind: the "object" field of a response.
      event_kind: the "object" field of an event.
      prefix: the beginning of the "id" field.
      continues_prompt: whether the text of the answer continues the text of the prompt.
    """

    kind, event_kind, prefix = "", "", ""
    continues_prompt = False

    def __init__(
        self, index: int, tokenizer: Tokenizer, *, has_logprobs: bool, echo: str = ""
    ) -> None:
        """
        Args:
          index: the number of the answer in the response.
          tokenizer: the tokenizer of the model or adapter.
          has_logprobs: whether the answer has log probabilities.
          echo: the prompt's text, if the answer begins with it.
        """
        self._index, self._tokenizer, self._has_logprobs = index, tokenizer, has_logprobs
        self._echo = echo
        self.count = 0  # of the tokens so far

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the answer as a whole."""
        tokens = [token for piece in pieces for token in piece.tokens]
        prompt = [token for piece in pieces for token in piece.prompt]
        self.count = len(tokens)
        text = "".join(piece.text for piece in pieces)
        return self._choice(text) | self._common_fields(prompt, tokens, pieces[-1].finish)

    def event(self, piece: Piece) -> dict[str, Any] | None:
        """Returns a piece of the answer; None if the piece has nothing to report."""
        self.count += len(piece.tokens)
        if not piece.text and piece.finish is None and not (self._has_logprobs and piece.tokens):
            return None
        fields = self._common_fields(piece.prompt, piece.tokens, piece.finish)
        return self._event_choice(piece.text) | fields

    def first_event(self) -> dict[str, Any] | None:
        """Returns what comes before the first piece, if anything."""
        return None

    def _common_fields(
        self, prompt: Sequence[Token], tokens: Sequence[Token], finish: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(prompt, tokens) if self._has_logprobs else None
        return {"index": self._index, "logprobs": logprobs, "finish_reason": finish}

    def _choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _event_choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, prompt: Sequence[Token], tokens: Sequence[Token]) -> dict[str, Any]:
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


class Completion(Choice):
    """Formats a completion of a text."""

    kind = event_kind = "text_completion"
    prefix = "cmpl"
    continues_prompt = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._offset = 0
        # The text of tokens that are valid text only together.
        self._partial_text = TextStream(self._tokenizer)

    def _choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _event_choice = _choice

    def _logprobs(self, prompt: Sequence[Token], tokens: Sequence[Token]) -> dict[str, Any]:
        names = [self._name(one.token) for one in (*prompt, *tokens)]
        offsets = [self._next_prompt_offset(name) for name in names[: len(prompt)]]
        self._offset = max(self._offset, len(self._echo))
        offsets += map(self._next_offset, (one.token for one in tokens), names[len(prompt) :])
        return {
            "tokens": names,
            "token_logprobs": [one.logprob for one in (*prompt, *tokens)],
            "top_logprobs": [self._top_logprobs(one) for one in (*prompt, *tokens)],
            "text_offset": offsets,
        }

    def _next_prompt_offset(self, name: str) -> int:
        """Returns the offset in the prompt where the token begins, and advances it past the token.

        A prompt has its special tokens only if it was given with them, and some tokenizers have a
        space before the first one that the text has not.
        """
        offset = self._offset
        found = (one for one in (name, name.lstrip()) if self._echo.startswith(one, offset))
        self._offset += len(next(found, ""))
        return offset

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

    def _top_logprobs(self, token: Token) -> dict[str, Any] | None:
        if token.logprob is None:
            return None
        logprobs: dict[str, Any] = {}
        for one in token.alternatives:
            name = self._name(one.token)
            # Several tokens can have the same text.
            logprobs[f"{TOKEN_ID_PREFIX}{one.token}" if name in logprobs else name] = one.logprob
        return logprobs


class Chat(Choice):
    """Formats the assistant's next message of a chat."""

    kind, event_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first_event(self) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": self._index, "delta": delta, "finish_reason": None}

    def _choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _event_choice(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, prompt: Sequence[Token], tokens: Sequence[Token]) -> dict[str, Any]:
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


class Writer:
    """Formats a response, or its events, with one or more answers."""

    def __init__(
        self, model: str, choices: Sequence[Choice], prompt: int, *, continuous_usage: bool = False
    ) -> None:
        """
        Args:
          model: the name of the model or adapter.
          choices: the formats of the answers.
          prompt: the number of tokens of all prompts.
          continuous_usage: whether every event has the numbers of tokens.
        """
        self._choices, self._prompt, self._continuous = choices, prompt, continuous_usage
        self._head = {
            "id": f"{choices[0].prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """Returns the body of a response with whole answers."""
        pairs = zip(self._choices, answers, strict=True)
        choices = [choice.whole(pieces) for choice, pieces in pairs]
        head = self._head | {"object": self._choices[0].kind}
        return head | {"choices": choices, "usage": self._usage()}

    def event(self, index: int, piece: Piece) -> str:
        """Returns the event of a piece of an answer; "" if the piece has nothing to report."""
        return self._event(self._choices[index].event(piece))

    def usage_event(self) -> str:
        """Returns the event with the numbers of tokens."""
        return event(self._event_head() | {"choices": [], "usage": self._usage()})

    def first_events(self) -> list[str]:
        """Returns the events before those of the first pieces."""
        return [self._event(choice.first_event()) for choice in self._choices]

    def _event(self, choice: dict[str, Any] | None) -> str:
        if choice is None:
            return ""
        usage = {"usage": self._usage()} if self._continuous else {}
        return event(self._event_head() | {"choices": [choice]} | usage)

    def _event_head(self) -> dict[str, Any]:
        return self._head | {"object": self._choices[0].event_kind}

    def _usage(self) -> dict[str, int]:
        count = sum(choice.count for choice in self._choices)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": count,
            "total_tokens": self._prompt + count,
        }


def event(body: dict[str, Any]) -> str:
    """Returns a server-sent event with a JSON body."""
    return f"data: {json.dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"
