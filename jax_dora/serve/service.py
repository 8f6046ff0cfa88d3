"""A model, its adapters and its engine: what the HTTP interface asks."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from jax_dora.models.chat import ChatTemplate
from jax_dora.serve.adapters import Adapters, ServedAdapter
from jax_dora.serve.body import Fields, unicode
from jax_dora.serve.engine import Engine, QueueFullError
from jax_dora.serve.errors import ApiError
from jax_dora.serve.request import Answer, Piece, Request


@dataclasses.dataclass
class Service:
    """Turns what clients ask into requests to the engine.

    Attributes:
      name: the base model's.
      template: of the model's chats; None where it has none.
      vocabulary: how many tokens tokenizer and model both know.
    """

    name: str
    engine: Engine
    adapters: Adapters
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocabulary: int

    def models(self) -> list[str]:
        """Returns the names of all that can be asked for, the base first."""
        return [self.name, *self.adapters.names()]

    def served(self, name: str) -> ServedAdapter | None:
        """Returns the adapter of a name; None for the base."""
        if name == self.name:
            return None
        served = self.adapters.get(name)
        if served is not None:
            return served
        if reason := self.adapters.damaged().get(name):
            told = f"The model {name!r} is there, but cannot be served: {reason}"
        else:
            near = difflib.get_close_matches(name[:200], self.models(), n=3)
            told = f"The model {name[:200]!r} does not exist"
            told += f"; near are {', '.join(map(repr, near))}" if near else ""
        raise ApiError(404, told, param="model", code="model_not_found")

    def text_tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(unicode("prompt", prompt)).ids
        return self._known("prompt", prompt)

    def chat_tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation, up to the assistant's next message."""
        if self.template is None:
            raise ApiError(400, f"{self.name} has no chat template; ask /v1/completions")
        try:
            text = self.template.render(messages, reply=True)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        text = unicode("messages", text)
        return self._known("messages", self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _known(self, param: str, tokens: list[int]) -> list[int]:
        if not tokens:
            raise ApiError(400, f"{param}: no tokens; expected one or more", param=param)
        if odd := [one for one in tokens if not 0 <= one < self.vocabulary]:
            told = f"{param} has token {odd[0]}; expected 0 to {self.vocabulary - 1}"
            raise ApiError(400, told, param=param)
        return tokens

    def submit(
        self,
        fields: Fields,
        served: ServedAdapter | None,
        prompt: list[int],
        sink: Callable[[Piece], None],
        *,
        continues_prompt: bool,
    ) -> Answer:
        most = self.engine.capacity
        room = most - len(prompt)
        wanted = fields.max_tokens if fields.max_tokens is not None else max(room, 1)
        if wanted > room:
            raise ApiError(
                400,
                f"The prompt has {len(prompt)} tokens and max_tokens is {wanted}, together "
                f"{len(prompt) + wanted}; this server's most is {most}",
                param="max_tokens" if room > 0 else "prompt",
                code="context_length_exceeded",
            )
        request = Request(tuple(prompt), wanted, sink, served, fields.sampling, continues_prompt)
        try:
            return self.engine.submit(request)
        except QueueFullError as error:
            raise ApiError(429, f"{error}; try again later", code="queue_full") from error
        except RuntimeError as error:
            raise ApiError(503, str(error)) from error
