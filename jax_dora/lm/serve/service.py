"""Turns HTTP requests into requests to the engine."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

from jax_dora.bank import StoredAdapter
from jax_dora.lm.models.chat import Messages
from jax_dora.lm.models.tokenizer import TextSettings, prompt_tokens
from jax_dora.lm.serve.adapters import Adapters, UnreadableError
from jax_dora.lm.serve.body import Fields, Prompt, check_unicode
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

    def tokens(
        self,
        prompt: Prompt,
        texts: TextSettings,
        variables: dict[str, Any] | None = None,
        adds_special_tokens: bool = True,
    ) -> list[int]:
        """Returns the tokens of a prompt, or of a chat up to the assistant's next message.

        Args:
          variables: variables for the chat template.
          adds_special_tokens: whether a text begins with the tokenizer's special tokens.
        """
        if isinstance(prompt, str):
            check_unicode("prompt", prompt)
            if adds_special_tokens:
                tokens = prompt_tokens(texts.tokenizer, prompt)
            else:
                tokens = texts.tokenizer.encode(prompt, add_special_tokens=False).ids
            return self._check_tokens("prompt", tokens, texts)
        if not isinstance(prompt[0], dict):
            return self._check_tokens("prompt", cast(list[int], prompt), texts)
        try:
            tokens = texts.chat_tokens(cast(Messages, prompt), variables)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        return self._check_tokens("messages", tokens, texts)

    def echo(self, prompt: Prompt, tokens: list[int], texts: TextSettings) -> str:
        """Returns the text that an answer begins with that repeats its prompt."""
        return prompt if isinstance(prompt, str) else texts.tokenizer.decode(tokens)

    def text(self, tokens: list[int], texts: TextSettings) -> str:
        """Returns the text of tokens."""
        self._check_known("tokens", tokens, texts)
        return texts.tokenizer.decode(tokens, skip_special_tokens=False)

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
        prompts: Sequence[tuple[list[int], str]],
        sink: Callable[[int, Piece], None],
        *,
        continues_prompt: bool,
    ) -> list[Answer]:
        """Submits requests to the engine: `fields.n` for each prompt, all or none.

        Args:
          fields: the fields of the request.
          adapter: the adapter; None for the base model.
          prompts: the tokens of each prompt, and the text that its answers begin with.
          sink: a function that is called with every piece, and the number of its answer.
          continues_prompt: whether the answers' texts continue the prompts' texts.

        Raises:
          ApiError: a prompt and max_tokens exceed a row's capacity, or the prompts and n the queue;
            a token in stop_token_ids or logit_bias does not exist; or the engine is full or has
            stopped.
        """
        texts, sampling = self.texts_of(adapter), fields.sampling
        for name, tokens in (
            ("stop_token_ids", fields.stop_token_ids),
            ("logit_bias", list(sampling.logit_bias)),
        ):
            self._check_known(name, tokens, texts)
        count = len(prompts) * fields.n
        if count > (most := self.engine.queue):
            param, message = "prompt" if len(prompts) > 1 else "n", f"{count} answers are asked for"
            raise ApiError(400, f"{param}: {message}; this server's maximum is {most}", param=param)
        requests = [
            Request(
                tuple(prompt),
                self._max_tokens(fields, len(prompt)),
                functools.partial(sink, number * fields.n + copy),
                fields.model,
                adapter,
                # As in vLLM: each answer has another seed.
                dataclasses.replace(sampling, seed=(sampling.seed + copy) % 2**64),
                fields.stop,
                fields.stop_token_ids,
                fields.ignore_eos,
                fields.logprobs,
                continues_prompt,
                echo,
                fields.echo and fields.logprobs is not None,
            )
            for number, (prompt, echo) in enumerate(prompts)
            for copy in range(fields.n)
        ]
        try:
            return self.engine.submit(*requests)
        except QueueFullError as error:
            raise ApiError(429, f"{error}; try again later", code="queue_full") from error
        except RuntimeError as error:
            raise ApiError(503, str(error)) from error

    def _max_tokens(self, fields: Fields, size: int) -> int:
        """Returns the maximum number of tokens of an answer to a prompt of `size` tokens."""
        capacity = self.engine.capacity
        room = capacity - size
        max_tokens = fields.max_tokens if fields.max_tokens is not None else max(room, 1)
        if max_tokens > room:
            raise ApiError(
                400,
                f"The prompt has {size} tokens and the answer up to {max_tokens} "
                f"(max_tokens), together {size + max_tokens}; this server's maximum is "
                f"{capacity}",
                param="max_tokens" if room > 0 else "prompt",
                code="context_length_exceeded",
            )
        return max_tokens
