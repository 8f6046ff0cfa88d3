"""Answers as OpenAI's interface writes them: whole, or as events while they come."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from jax_dora.models.text import TextStream
from jax_dora.serve.request import Piece, Token

NUMBER = "token_id:"  # begins the name of a token that is no whole letters


class Writer:
    """Writes one answer; `Completion` and `Chat` differ in where the text stands."""

    kind, event_kind, prefix = "", "", ""
    continues_prompt = False  # the prompt's text

    def __init__(self, model: str, tokenizer: Tokenizer, prompt: int, tells: bool) -> None:
        # The prompt's tokens, and whether the answer's probabilities are told.
        self._tokenizer, self._prompt, self._tells = tokenizer, prompt, tells
        self._count = 0
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the answer that the pieces are."""
        tokens = [token for piece in pieces for token in piece.tokens]
        self._count = len(tokens)
        text = "".join(piece.text for piece in pieces)
        choice = self._choice(text) | self._rest(tokens, pieces[-1].finish)
        head = self._head | {"object": self.kind}
        return head | {"choices": [choice], "usage": self._usage()}

    def event(self, piece: Piece) -> str:
        """Returns the event of a piece; "" where nothing can be said by now."""
        self._count += len(piece.tokens)
        if not piece.text and piece.finish is None and not (self._tells and piece.tokens):
            return ""
        choice = self._event_choice(piece.text) | self._rest(piece.tokens, piece.finish)
        return self._event([choice])

    def usage_event(self) -> str:
        return self._event([], usage=self._usage())

    def first_events(self) -> list[str]:
        return []

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event(self._head | {"object": self.event_kind, "choices": choices} | more)

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._count,
            "total_tokens": self._prompt + self._count,
        }

    def _rest(self, tokens: Sequence[Token], finish: str | None) -> dict[str, Any]:
        told = self._probabilities(tokens) if self._tells else None
        return {"index": 0, "logprobs": told, "finish_reason": finish}

    def _choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _event_choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _probabilities(self, tokens: Sequence[Token]) -> dict[str, Any]:
        raise NotImplementedError

    def _name(self, token: int) -> str:
        """Returns the token's text; of one that is no whole letters, its number."""
        text = self._text(token, skip_special_tokens=False)
        return f"{NUMBER}{token}" if "\ufffd" in text or not text else text

    def _text(self, token: int, *, skip_special_tokens: bool) -> str:
        """Returns what the token adds to itself, since some decoders take the first space of a text
        away."""
        once, twice = (
            self._tokenizer.decode([token] * count, skip_special_tokens=skip_special_tokens)
            for count in (1, 2)
        )
        return twice[len(once) :]


class Completion(Writer):
    """Writes what follows a text."""

    kind = event_kind = "text_completion"
    prefix = "cmpl"
    continues_prompt = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offset = 0
        self._letters = TextStream(self._tokenizer)  # of tokens that are no whole ones

    def _choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _event_choice = _choice

    def _probabilities(self, tokens: Sequence[Token]) -> dict[str, Any]:
        names = [self._name(one.token) for one in tokens]
        return {
            "tokens": names,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [self._likeliest(one) for one in tokens],
            "text_offset": [
                self._place(one.token, name) for one, name in zip(tokens, names, strict=True)
            ],
        }

    def _place(self, token: int, name: str) -> int:
        """Returns where in the text the next token begins; a part of a letter, where that does."""
        is_part = name.startswith(NUMBER)
        if not is_part:
            self._offset += len(self._letters.end())
            self._letters = TextStream(self._tokenizer)
        place = self._offset
        # Special tokens have names, and no place in the text.
        if is_part:
            self._offset += len(self._letters.add(token))
        else:
            self._offset += len(self._text(token, skip_special_tokens=True))
        return place

    def _likeliest(self, one: Token) -> dict[str, float]:
        named: dict[str, float] = {}
        for other in one.likeliest:
            name = self._name(other.token)
            # Several tokens may have one text.
            named[f"{NUMBER}{other.token}" if name in named else name] = other.logprob
        return named


class Chat(Writer):
    """Writes the assistant's next message."""

    kind, event_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first_events(self) -> list[str]:
        delta = {"role": "assistant", "content": ""}
        return [self._event([{"index": 0, "delta": delta, "finish_reason": None}])]

    def _choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _event_choice(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _probabilities(self, tokens: Sequence[Token]) -> dict[str, Any]:
        content = [
            self._entry(one) | {"top_logprobs": [self._entry(other) for other in one.likeliest]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, one: Token) -> dict[str, Any]:
        name = self._name(one.token)
        is_text = not name.startswith(NUMBER)
        encoded = list(name.encode()) if is_text else None
        return {"token": name, "logprob": one.logprob, "bytes": encoded}


def event(body: dict[str, Any]) -> str:
    """Returns a server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"
