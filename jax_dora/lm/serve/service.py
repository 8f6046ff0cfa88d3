"""Turns HTTP requests into requests to the engine."""

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import Any

from jax_dora.bank import StoredAdapter
from jax_dora.lm.models.tokenizer import TextSettings, prompt_tokens
from jax_dora.lm.serve.adapters import Adapters, UnreadableError
from jax_dora.lm.serve.body import Fields, check_unicode
from jax_dora.lm.serve.engine import Engine, QueueFullError
from jax_dora.lm.serve.errors import ApiError
from jax_dora.lm.serve.request import Answer, Piece, Request


@dataclasses.dataclass
class Service:
    """A model with its adapters, its tokenizer and its engine.

    Attributes:
      name: the name of the base model.
      engine: the engine that answers requests.
      adapters: the adapters.
      texts: how the base model reads and writes text, and adapters that say nothing else.
      vocab_size: the number of tokens of the model, of which a tokenizer may use fewer.
    """

    name: str
    engine: Engine
    adapters: Adapters
    texts: TextSettings
    vocab_size: int

    def models(self) -> list[str]:
        """Returns the names of the base model and of all adapters."""
        return [self.name, *self.adapters.names()]

    def adapter(self, name: str) -> StoredAdapter | None:
        """Returns the adapter of a name; None for the base model's name.

        This may take long, since the adapter is read again if it is not in host memory.

        Raises:
          ApiError: there is no such adapter, or its folder is damaged.
        """
        if name == self.name:
            return None
        try:
            adapter = self.adapters.get(name)
        except UnreadableError as error:
            raise ApiError(503, str(error), param="model") from error
        if adapter is None:
            raise self._not_found(name)
        return adapter

    def check_name(self, name: str) -> None:
        """Raises ApiError unless a name is that of the base model or of an adapter."""
        if name != self.name and name not in self.adapters:
            raise self._not_found(name)

    def _not_found(self, name: str) -> ApiError:
        if reason := self.adapters.damaged().get(name):
            message = f"The model {name!r} exists, but cannot be served: {reason}"
        else:
            names = {one.casefold(): one for one in self.models()}
            matches = difflib.get_close_matches(name[:200].casefold(), names, n=3)
            nearest = [names[one] for one in matches]
            message = f"The model {name[:200]!r} does not exist"
            message += f"; the nearest are {', '.join(map(repr, nearest))}" if nearest else ""
        return ApiError(404, message, param="model", code="model_not_found")

    def texts_of(self, adapter: StoredAdapter | None) -> TextSettings:
        """Returns how an adapter, or the base model, reads and writes text."""
        texts = None if adapter is None else adapter.extra
        return self.texts if texts is None else texts

    def text_tokens(self, prompt: str | list[int], texts: TextSettings) -> list[int]:
        """Returns the tokens of a prompt."""
        if isinstance(prompt, str):
            prompt = prompt_tokens(texts.tokenizer, check_unicode("prompt", prompt))
        return self._check_tokens("prompt", prompt, texts)

    def chat_tokens(self, messages: list[dict[str, Any]], texts: TextSettings) -> list[int]:
        """Returns the tokens of a chat, up to the beginning of the assistant's next message."""
        if texts.template is None:
            raise ApiError(400, f"{self.name} has no chat template; use /v1/completions")
        try:
            text = texts.template.render(messages, reply=True)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        text = check_unicode("messages", text)
        tokens = texts.tokenizer.encode(text, add_special_tokens=False).ids
        return self._check_tokens("messages", tokens, texts)

    def _check_tokens(self, param: str, tokens: list[int], texts: TextSettings) -> list[int]:
        if not tokens:
            raise ApiError(400, f"{param}: no tokens; expected one or more", param=param)
        self._check_known(param, tokens, texts)
        return tokens

    def _check_known(self, param: str, tokens: Sequence[int], texts: TextSettings) -> None:
        size = min(self.vocab_size, texts.tokenizer.get_vocab_size())
        if unknown := [one for one in tokens if not 0 <= one < size]:
            message = f"{param} has token {unknown[0]}; expected 0 to {size - 1}"
            raise ApiError(400, message, param=param)

    def submit(
        self,
        fields: Fields,
        adapter: StoredAdapter | None,
        prompt: list[int],
        sink: Callable[[Piece], None],
        *,
        continues_prompt: bool,
    ) -> Answer:
        """Submits a request to the engine.

        Args:
          fields: the fields of the request.
          adapter: the adapter; None for the base model.
          prompt: the tokens of the prompt.
          sink: a function that is called with every piece of the answer.
          continues_prompt: whether the answer's text continues the prompt's text.

        Raises:
          ApiError: the prompt and max_tokens exceed a row's capacity, a token in stop_token_ids
            does not exist, or the engine is full or has stopped.
        """
        self._check_known("stop_token_ids", fields.stop_token_ids, self.texts_of(adapter))
        capacity = self.engine.capacity
        room = capacity - len(prompt)
        max_tokens = fields.max_tokens if fields.max_tokens is not None else max(room, 1)
        if max_tokens > room:
            raise ApiError(
                400,
                f"The prompt has {len(prompt)} tokens and the answer up to {max_tokens} "
                f"(max_tokens), together {len(prompt) + max_tokens}; this server's maximum is "
                f"{capacity}",
                param="max_tokens" if room > 0 else "prompt",
                code="context_length_exceeded",
            )
        request = Request(
            tuple(prompt),
            max_tokens,
            sink,
            adapter,
            fields.sampling,
            fields.stop,
            fields.stop_token_ids,
            fields.ignore_eos,
            fields.logprobs,
            continues_prompt,
        )
        try:
            return self.engine.submit(request)
        except QueueFullError as error:
            raise ApiError(429, f"{error}; try again later", code="queue_full") from error
        except RuntimeError as error:
            raise ApiError(503, str(error)) from error
